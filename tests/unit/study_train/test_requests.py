"""What the studies' commands become, with what the files that they name say of themselves."""

import argparse
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.unit.study_train.conftest import LISTS, PADDED, asked
from tokenscale.base.errors import UserError
from tokenscale.cli import train
from tokenscale.cli.train_request import parse_request
from tokenscale.settings import source_studies
from tokenscale.settings.data import StorageSettings, TokenizerSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings

ROOT = Path(__file__).parents[3]


def test_the_second_command_of_the_first_study(here):
    """`--batch-size` is rows of one rank; how the file is stored, and its tokenizer, come from its manifest."""
    asking = asked(
        *f"--dataset {PADDED} --dataset-type padded --pretokenized --sequence-length 32 --batch-size 2".split(),
        *"--learning-rate 5e-5 --lr-warmup-steps 100 --training-steps 1000".split(),
    )
    run = asking.run
    assert (run.approach, run.sequence_length, run.budget.steps) == ("pretokenized-padded", 32, 1000)
    assert (run.micro_batch, run.global_batch, run.layout.world_size) == (2, 2, 1)
    assert (run.optimizer.learning_rate, run.schedule.warmup_steps) == (5e-5, 100)
    assert run.storage == StorageSettings(codec="snappy", dtype="int64") and run.validation.rows == 0
    assert run.tokenizer == TokenizerSettings(name="bpe", kind="bpe", corpus="bpe", vocabulary_size=300)
    assert asking.store == Path("out/web_tokenized_padded_snappy.manifest.json")


def test_its_third_command_counts_the_ranks_of_torchrun(here):
    words = f"--distributed --dataset {PADDED} --dataset-type padded --pretokenized --batch-size 8".split()
    run = asked(*words, "--gradient-accumulation-steps", "2", world_size=8).run
    assert (run.layout.data, run.micro_batch, run.global_batch) == (8, 8, 128)
    assert asked(*words, "--world-size", "8", world_size=8).run.global_batch == 64


def test_shards_are_counted_among_the_ranks_of_torchrun(here):
    words = f"--dataset {PADDED} --dataset-type padded --pretokenized --batch-size 4 --layout.shard 2".split()
    run = asked(*words, world_size=8).run
    assert (run.layout.data, run.layout.shard, run.global_batch) == (4, 2, 32)
    assert asked(*words).run.global_batch == 8, "the ranks are started here"
    with pytest.raises(UserError, match="do not fit the number") as refused:
        asked(*words, world_size=3)
    assert refused.value.facts["next"] == "take a multiple of 2 ranks"


def test_a_world_size_is_that_of_all_degrees(here):
    words = f"--dataset {PADDED} --dataset-type padded --pretokenized --batch-size 4 --model llama-micro".split()
    run = asked(*words, "--world-size", "8", "--layout.shard", "2", "--layout.pipeline", "2").run
    assert (run.layout.data, run.layout.world_size, run.global_batch, run.layout.method) == (2, 8, 16, "1f1b-hsdp")
    for more in (["--layout.data", "3"], ["--layout.pipeline", "3"]):
        with pytest.raises(UserError, match="do not fit the number"):
            asked(*words, "--world-size", "8", *more)


def test_the_fourth_studys_spellings_are_taken(here):
    words = "--dataset tinystories --data_path stories.txt --model_size small --max_steps 50 --batch_size 4".split()
    run = asked(*words).run
    assert run.model == PRESETS["study-small"] and run.budget.steps == 50 and run.global_batch == 4
    source = run.corpus.source
    assert (source.kind, source.files, source.separator) == ("files", ("stories.txt",), "<|endoftext|>")


@pytest.mark.parametrize("pair, approach", source_studies.APPROACH_OF.items())
def test_dataset_type_and_pretokenized_name_an_approach(here, pair, approach):
    form, beforehand = pair
    words = ["--dataset-type", form, *(["--pretokenized"] if beforehand else [])]
    dataset = (
        {"pretokenized-padded": PADDED, "token-list": LISTS, "length-bucketed": LISTS, "packed": None}[approach]
        if beforehand
        else "web.parquet"
    )
    assert dataset is None or asked("--dataset", dataset, *words).run.approach == approach  # no file holds packed rows
    if beforehand:
        assert asked("--dataset", "tinystories", *words).run.approach == approach, "a corpus is tokenized beforehand"


STUDY_003 = "--dataset tinystories --dataset-type padded --model llama-micro --model_max_length 32"


def test_study_003_counts_the_rows_of_all_ranks(here):
    """Its --batch_size is divided among the ranks; that of the other studies is one rank's."""
    words = [*STUDY_003.split(), *"--world_size 2 --batch_size 128 --n_epochs 10 --learning_rate 1e-4".split()]
    asking = asked(*words)
    run = asking.run
    assert (run.layout.data, run.micro_batch, run.global_batch, run.sequence_length) == (2, 64, 128, 32)
    assert asking.epochs == 10 and run.optimizer.learning_rate == 1e-4
    assert any("counts the rows of all ranks" in note and "64 a rank" in note for note in asking.notes)
    assert asked(*words, world_size=2).run == run, "ranks of torchrun"
    ours = "--dataset tinystories --dataset-type padded --model llama-micro --sequence-length 32 --world-size 2".split()
    assert asked(*ours, "--batch-size", "128", "--epochs", "10").run.global_batch == 256


@pytest.mark.parametrize(
    "words, stages, schedule, micro_batch",
    [
        ("--model_parallel_mode model_parallel --batch_size 32", 2, "naive", 32),
        ("--model_parallel_mode pipeline_parallel --batch_size 32", 2, "gpipe", 8),
        ("--model_parallel_mode=pipeline_parallel --batch_size 30 --n_chunk 4", 2, "gpipe", 8),
        ("--model_parallel_mode pipeline_parallel --batch_size 32 --n_chunk 2 --world_size 4", 4, "gpipe", 16),
        ("--model_parallel_mode pipeline_parallel --batch_size 32 --layout.schedule 1f1b", 2, "1f1b", 8),
        ("--model_parallel_mode pipeline_parallel", 2, "gpipe", 2),
        ("--model_parallel_mode pipeline_parallel --batch_size 32 --layout.data 2 --world_size 4", 2, "gpipe", 4),
        ("--model_parallel_mode None --batch_size 32", 1, "1f1b", 32),
    ],
)
def test_study_003_splits_the_layers_over_all_ranks(here, words, stages, schedule, micro_batch):
    run = asked(*STUDY_003.split(), "--model", "llama-small", *words.split()).run
    assert (run.layout.pipeline, run.layout.schedule, run.micro_batch) == (stages, schedule, micro_batch)
    assert run.global_batch == (32 if "--batch_size 32" in words else 30 if "30" in words else 8)


def test_study_003s_data_set_is_named_as_on_the_hub(here):
    config = json.loads(Path("config/config.yaml").read_text())
    source = {"repository": "bbaaaa/iwslt14-de-en-preprocess", "revision": "a" * 40, "files": "train.parquet"}
    config["corpora"]["iwslt"] = {"source": source}
    Path("config/config.yaml").write_text(json.dumps(config))
    run = asked("--dataset", "bbaaaa/iwslt14-de-en-preprocess", "--n_epochs", "1").run
    assert run.corpus.name == "iwslt" and run.corpus.source.kind == "hub"


#: the commands of the studies' own READMEs, by the program and the flags that say which one it is
STUDY_COMMANDS = {
    "pretokenize.py --input-path": "pretokenize",
    "src/train.py --pretokenized": "train",
    "torchrun … src/train.py --distributed": "train",
    "run_data_parallel.py --world_size 2 --batch_size 128 --n_epochs 10": "train",
    "run_pipeline.py --model_parallel_mode='model_parallel'": "train",
    "run_pipeline.py --model_parallel_mode='pipeline_parallel'": "train",
    "modal run modal_run.py --world-size 2 --n-epochs 5": "train",
    "ddp_trainer.py --config configs/small_model.yaml": "train",
    "ddp_trainer.py --dataset tinystories": "train",
    "ddp_trainer.py --dataset dummy": "train",
}


def test_the_table_of_study_commands_has_every_command_and_no_flag_that_is_not_there(monkeypatch):
    text = (
        (ROOT / "docs/source-studies.md").read_text().split("# The commands of the source studies")[1].split("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ")][1:]
    monkeypatch.chdir(ROOT)
    for command, verb in STUDY_COMMANDS.items():
        ((_, ours),) = [row for row in rows if command in row[0]]
        parser = argparse.ArgumentParser(allow_abbrev=False)
        importlib.import_module(f"tokenscale.cli.{verb}").add_arguments(parser)
        known = {name for action in parser._actions for name in action.option_strings}
        for code in re.findall(r"`([^`]+)`", ours):
            flags_of = set(re.findall(r"--[\w.-]+", code.split("-m tokenscale")[-1])) - {"--checkpoint"}
            assert "torchrun" in code or flags_of <= known, (command, flags_of - known)
            if code.startswith("python -m tokenscale train") and "out/" not in code and "…" not in code:
                words = shlex.split(code)[4:]
                assert parse_request(parser.parse_args(words)).run.problems() == [], code
    (data_parallel,) = [row[1] for row in rows if "run_data_parallel.py" in row[0]]
    run = parse_request(parser.parse_args(shlex.split(re.findall(r"`([^`]+)`", data_parallel)[0])[4:])).run
    assert (run.global_batch, run.micro_batch, run.sequence_length, run.model.name) == (128, 64, 128, "gpt2-124m")
    assert (run.labels, run.eos, run.schedule.shape, run.corpus.name) == ("target", True, "constant", "iwslt14-de-en")


def test_a_pretokenized_file_says_what_it_is(here):
    assert asked("--dataset", PADDED, "--pretokenized").run.sequence_length == 32
    assert asked("--dataset", LISTS, "--pretokenized").run.approach == "token-list"


def test_a_short_run_has_a_warm_up_that_fits(here):
    assert asked("--training-steps", "4").run.schedule.warmup_steps == 4
    assert asked("--training-steps", "40").run.schedule.warmup_steps == RunSettings().schedule.warmup_steps


def test_dummy_fills_the_models_vocabulary():
    run = asked().run
    assert (run.corpus.source.kind, run.corpus.source.vocabulary_size, run.tokenizer.kind) == (
        "dummy",
        50_254,
        "numbers",
    )
    assert run.tokenizer.vocabulary_size == 50_257
    nemo = asked("--model", "llama-1.4b-nemo").run
    assert nemo.tokenizer.vocabulary_size == nemo.model.vocabulary_size == 131_072
    assert nemo.corpus.name != run.corpus.name


@pytest.mark.parametrize("words, device", [([], "auto"), (["--device", "cpu"], "cpu")])
def test_ranks_of_torchrun_join_on_the_device_that_the_flags_say(monkeypatch, words, device):
    from tokenscale.cli import train as command
    from tokenscale.cli import train_torchrun as together

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    joined = []
    monkeypatch.setattr(together, "join", lambda *asked: joined.append(asked))
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    with pytest.raises(AttributeError):  # what came back is no world: further it does not go
        command.run(parser.parse_args(words))
    assert joined == [(2, device)]
