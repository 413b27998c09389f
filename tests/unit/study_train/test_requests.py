"""What the studies' commands become: a table of words and the settings of their run."""

import argparse
import dataclasses
import json
import operator
import re
import shlex
import typing
from pathlib import Path

import pytest
import yaml

from tests.unit.study_train.conftest import LISTS, PADDED, PRESET, asked
from tokenscale.base.errors import UserError
from tokenscale.cli.main import load_command, main
from tokenscale.cli.train.request import parse_request
from tokenscale.settings import flags, source_studies
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings

ROOT = Path(__file__).parents[3]
FILE = f"--dataset {PADDED} --dataset-type padded --pretokenized"
SHARDS = f"{FILE} --batch-size 4 --layout.shard 2"
DEGREES = (
    f"{FILE} --batch-size 4 --model llama-micro --world-size 8 --layout.shard 2 --layout.pipeline 2"
)
#: study 003 counts the rows of all ranks in its --batch_size; in the other studies it is one rank's
STORIES = "--dataset tinystories --dataset-type padded --model llama-micro --model_max_length 32"
STUDY_003 = f"{STORIES} --world_size 2 --batch_size 128 --n_epochs 10 --learning_rate 1e-4"
MODE = f"{STORIES} --model llama-small --model_parallel_mode"
PRESET_FILE = "--config preset.yaml"
FSDP = (
    f"--config {ROOT}/config/presets/fsdp_config.yaml --model-size medium --dataset dummy "
    "--world-size"
)

#: words, behind `N:` where torchrun started N ranks, and below them settings of the run
COMMANDS = f"""
{FILE} --sequence-length 32 --batch-size 2 --learning-rate 5e-5 --lr-warmup-steps 100 --training-steps 1000
    approach=pretokenized-padded sequence_length=32 budget.steps=1000 micro_batch=2 global_batch=2 layout.world_size=1
    validation.rows=0 optimizer.learning_rate=5e-05 schedule.warmup_steps=100 storage.codec=snappy storage.dtype=int64
    tokenizer.name=bpe tokenizer.kind=bpe tokenizer.corpus=bpe tokenizer.vocabulary_size=300
8: --distributed {FILE} --batch-size 8 --gradient-accumulation-steps 2
    layout.data=8 micro_batch=8 global_batch=128
8: --distributed {FILE} --batch-size 8 --world-size 8
    global_batch=64
8: {SHARDS}
    layout.data=4 layout.shard=2 global_batch=32
{SHARDS}
    global_batch=8
{DEGREES}
    layout.data=2 layout.world_size=8 global_batch=16 layout.method=1f1b-hsdp
--dataset tinystories --data_path stories.txt --model_size small --max_steps 50 --batch_size 4
    model.name=study-small budget.steps=50 global_batch=4 corpus.source.kind=files corpus.source.files=('stories.txt',)
    corpus.source.separator=<|endoftext|>
{STUDY_003}
    layout.data=2 micro_batch=64 global_batch=128 sequence_length=32 optimizer.learning_rate=0.0001
2: {STUDY_003}
    layout.data=2 micro_batch=64 global_batch=128 sequence_length=32 optimizer.learning_rate=0.0001
--dataset tinystories --dataset-type padded --model llama-micro --world-size 2 --batch-size 128 --epochs 10
    global_batch=256
{MODE} model_parallel --batch_size 32
    layout.pipeline=2 layout.schedule=naive micro_batch=32 global_batch=32
{MODE} pipeline_parallel --batch_size 32
    layout.pipeline=2 layout.schedule=gpipe micro_batch=8 global_batch=32
{MODE}=pipeline_parallel --batch_size 30 --n_chunk 4
    layout.pipeline=2 layout.schedule=gpipe micro_batch=8 global_batch=30
{MODE} pipeline_parallel --batch_size 32 --n_chunk 2 --world_size 4
    layout.pipeline=4 layout.schedule=gpipe micro_batch=16 global_batch=32
{MODE} pipeline_parallel --batch_size 32 --layout.schedule 1f1b
    layout.pipeline=2 layout.schedule=1f1b micro_batch=8 global_batch=32
{MODE} pipeline_parallel
    layout.pipeline=2 layout.schedule=gpipe micro_batch=2 global_batch=8
{MODE} pipeline_parallel --batch_size 32 --layout.data 2 --world_size 4
    layout.pipeline=2 layout.schedule=gpipe micro_batch=4 global_batch=32
{MODE} None --batch_size 32
    layout.pipeline=1 layout.schedule=1f1b micro_batch=32 global_batch=32
--dataset {PADDED} --pretokenized
    sequence_length=32
--dataset {LISTS} --pretokenized
    approach=token-list
--dataset {LISTS} --pretokenized --dataset-type length-bucketed
    approach=length-bucketed
--dataset web.parquet --dataset-type padding-free
    approach=padding-free
--training-steps 4 --optimizer.clip-norm none
    schedule.warmup_steps=4 optimizer.clip_norm=None
--optimizer.clip-norm null
    optimizer.clip_norm=None
--training-steps 40
    schedule.warmup_steps={RunSettings().schedule.warmup_steps}
--dataset dummy
    corpus.source.kind=dummy corpus.source.vocabulary_size=50254 tokenizer.kind=numbers tokenizer.vocabulary_size=50257
--model llama-1.4b-nemo
    tokenizer.vocabulary_size=131072 model.vocabulary_size=131072
{PRESET_FILE} --dataset web.parquet --world-size 2
    optimizer.learning_rate=0.0006 budget.steps=20 schedule.warmup_steps=4 precision=fp32 micro_batch=2 global_batch=12
    sequence_length=32 model.name=preset model.hidden=128 model.tied_embeddings=True
    tokenizer.kind=bpe tokenizer.vocabulary_size=300
{PRESET_FILE} --learning-rate 1e-3 --training-steps 9 --sequence-length 64 --precision bf16
    optimizer.learning_rate=0.001 budget.steps=9 sequence_length=64 precision=bf16 schedule.warmup_steps=4
{PRESET_FILE} --batch-size 5
    global_batch=15
{PRESET_FILE} --global-batch 7
    global_batch=7
{PRESET_FILE} --micro-batch 1
    micro_batch=1 global_batch=6
{PRESET_FILE} --model llama-micro
    model.name=llama-micro
{FSDP} 4
    layout.shard=4 layout.data=1 layout.tensor=1 global_batch=128 activation_checkpointing=block model.name=study-medium
{FSDP} 1
    layout.world_size=1 global_batch=32 precision=bf16
{FSDP} 4 --layout.shard 2
    layout.shard=2 layout.data=2 global_batch=128
{FSDP} 4 --layout.tensor 2
    layout.shard=2 layout.data=1 layout.tensor=2 global_batch=64
"""


@pytest.mark.parametrize(
    "row", re.findall(r"(?m)^(?:(\d):)?(\S?.*)\n((?: {4}.*\n)+)", COMMANDS), ids=lambda row: row[1]
)
def test_a_command_becomes_the_settings_of_a_run(shared, row):
    ranks, words, settings = row
    run = asked(*words.split(), world_size=int(ranks) if ranks else None).run
    expected = dict(setting.split("=", 1) for setting in settings.split())
    assert {key: str(operator.attrgetter(key)(run)) for key in expected} == expected
    assert run.model.name not in PRESETS or run.model == PRESETS[run.model.name]


def test_what_a_command_says_beside_its_settings(shared):
    assert asked(*FILE.split()).store == Path("out/web_tokenized_padded_snappy.manifest.json")
    course = asked(*STUDY_003.split())
    assert course.epochs == 10
    assert any(
        "counts the rows of all ranks" in note and "64 a rank" in note for note in course.notes
    )
    assert asked(
        *f"{PRESET_FILE} --dataset web.parquet".split()
    ).run.tokenizer.learnt_from.name.startswith("web-")
    assert asked("--model", "llama-1.4b-nemo").run.corpus.name != asked().run.corpus.name


@pytest.mark.parametrize(
    "words, ranks",
    [(SHARDS, 3), *((f"{DEGREES} --layout.{m} 3", None) for m in ("data", "pipeline"))],
)
def test_degrees_that_do_not_make_up_the_ranks_are_refused(shared, words, ranks):
    with pytest.raises(UserError, match="do not fit the number") as refused:
        asked(*words.split(), world_size=ranks)
    assert ranks is None or refused.value.facts["next"] == "take a multiple of 2 ranks"


def test_study_003s_data_set_is_named_as_on_the_hub(here):
    source = {
        "repository": "bbaaaa/iwslt14-de-en-preprocess",
        "revision": "a" * 40,
        "files": "train.parquet",
    }
    Path("config/config.yaml").write_text(
        json.dumps({"experiments": [], "corpora": {"iwslt": {"source": source}}})
    )
    run = asked("--dataset", "bbaaaa/iwslt14-de-en-preprocess", "--n_epochs", "1").run
    assert run.corpus.name == "iwslt" and run.corpus.source.kind == "hub"


@pytest.mark.parametrize("name, weights", [("small", "study-small"), ("medium", "study-medium")])
def test_the_shipped_preset_files_are_the_studys(name, weights):
    file = source_studies.load_preset_file(str(ROOT / f"config/presets/{name}_model.yaml"))
    model = file.model_settings("x")
    assert (
        dataclasses.replace(model, vocabulary_size=None) == PRESETS[weights]
        and model.vocabulary_size == 50_257
    )
    assert file.values()["precision"] == "bf16" and file.values()["sequence_length"] == 1024
    assert file.training.batch_size * file.training.gradient_accumulation_steps == 32
    assert yaml.safe_load(PRESET)["training"]["learning_rate"] == "6e-4"  # text to YAML 1.1


def test_the_study_commands_of_the_documents_have_no_flag_that_is_not_there(monkeypatch):
    monkeypatch.chdir(ROOT)
    table = (ROOT / "docs/source-studies.md").read_text().split("\n## Their commands\n")[1]
    codes = re.findall(r"`\.venv/bin/tokenscale (\w+) ([^`]+)`", table.split("\n## ")[0])
    for verb, words in codes:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        load_command(verb).add_arguments(parser)
        known = {name for action in parser._actions for name in action.option_strings}
        assert {
            word.split("=")[0] for word in shlex.split(words) if word.startswith("--")
        } <= known, words
        if verb == "train" and not any(part in words for part in ("--help", "out/", "…")):
            assert parse_request(parser.parse_args(shlex.split(words))).run.problems() == [], words
    assert len(codes) >= 4


@pytest.mark.parametrize("words, device", [([], "auto"), (["--device", "cpu"], "cpu")])
def test_ranks_of_torchrun_join_on_the_device_that_the_flags_say(monkeypatch, words, device):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    joined = []
    monkeypatch.setattr(
        "tokenscale.cli.train.torchrun.join", lambda layout, device: joined.append(device)
    )
    with pytest.raises(AttributeError):  # what came back is no world: further it does not go
        main(["train", *words])
    assert joined == [device]


@pytest.mark.parametrize("approach", dict.fromkeys(source_studies.APPROACH_OF.values()))
def test_the_approach_is_a_flag_as_the_settings_name_it(approach):
    assert asked("--dataset", "dummy", "--approach", approach).run.approach == approach
    with pytest.raises(UserError, match="leave one of them out"):
        asked("--dataset", "dummy", "--approach", approach, "--dataset-type", "padded")


def sample(hint, default):
    """(text, value) of some other value than the default."""
    if typing.get_origin(hint) is typing.Literal:
        # there may be one value alone
        other = next((v for v in typing.get_args(hint) if v != default), default)
        return other, other
    if hint is bool:
        return str(not default).lower(), not default
    if hint is int:
        return str((default or 1) + 1), (default or 1) + 1
    if hint is str:
        return "there", "there"
    return ("0.5", 0.5) if default != 0.5 else ("0.25", 0.25)


@pytest.mark.parametrize("flag", source_studies.RUN_FLAGS, ids=lambda flag: flag.key)
def test_each_setting_of_a_run_has_a_flag_that_sets_it(flag):
    hint = next((h for h in typing.get_args(flag.hint) if h in (float, int, str, bool)), flag.hint)
    text, value = sample(hint, flag.default)
    for name in flag.names:
        parser = argparse.ArgumentParser()
        flags.add_flags(parser, source_studies.RUN_FLAGS)
        stated = flags.parse_flags(parser.parse_args([name, text]), source_studies.RUN_FLAGS)
        assert stated == {flag.key: value}
        run = flags.replace_values(RunSettings(), stated)
        for part in flag.key.split("."):
            run = getattr(run, part)
        assert run == value
