"""The flags of `train`: the studies' words and the settings' own, what they become, and what is refused."""

import argparse
import dataclasses
import json
import math
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.corpora import make_corpus, make_tokenizer
from tokenscale.cli import main
from tokenscale.commands.prepare import Job, prepare
from tokenscale.commands.request import Request, request
from tokenscale.errors import UserError
from tokenscale.formats.manifest import open_store
from tokenscale.records import outcome, provenance
from tokenscale.settings import flags, study
from tokenscale.settings.data import CorpusSettings, StorageSettings, TokenizerSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import APPROACHES, RunSettings
from tokenscale.verbs import train

TEXTS = [f"document number {i} has some words, {'and more ' * (i % 17)}" for i in range(120)]
CONFIG = {
    "experiments": [],
    "corpora": {"tinystories": {"source": {"files": "stories.txt", "separator": "<|endoftext|>"}}},
    "tokenizers": {
        "own": {"kind": "bpe", "corpus": "tinystories", "vocabulary_size": 280},
        "tekken": {"kind": "tekken"},
    },
}
PRESET = """\
model: {vocab_size: 300, hidden_size: 32, num_layers: 2, num_heads: 2, max_seq_len: 32}
training: {batch_size: 2, gradient_accumulation_steps: 3, learning_rate: 6e-4, max_steps: 20, warmup_steps: 4}
distributed: {backend: gloo, mixed_precision: no}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A project folder: text in three shapes, a configuration, a small tokenizer, and pretokenized files."""
    root = tmp_path_factory.mktemp("place")
    pq.write_table(pa.table({"text": TEXTS}), root / "web.parquet")
    (root / "stories.txt").write_text("<|endoftext|>".join(TEXTS))
    (root / "book.txt").write_text(" ".join(TEXTS))
    (root / "config").mkdir()
    (root / "config/config.yaml").write_text(json.dumps(CONFIG))
    (root / "preset.yaml").write_text(PRESET)
    make_tokenizer(root / "results/tokenizers/bpe", make_corpus(root / "corpus", TEXTS), 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        arguments = ["--input-path", "web.parquet", "--output-dir", "out", "--tokenizer-name", "bpe"]
        assert main(["pretokenize", *arguments, "--max-length", "32", "--dtype", "int64"]) == 0
    return root


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def asked(*arguments: str, world_size: int | None = None) -> Request:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return request(parser.parse_args(arguments), world_size)


def prepared(*arguments: str) -> Job:
    return prepare(asked(*arguments), lambda line: None)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


PADDED = "out/web_tokenized_padded_snappy.parquet"
LISTS = "out/web_tokenized_token-list_snappy.parquet"

# ------------------------------------------------------------------------------------------------------------- flags


def sample(hint, default):
    """(text, value) of some other value than the default."""
    if typing.get_origin(hint) is typing.Literal:
        other = next(v for v in typing.get_args(hint) if v != default)
        return other, other
    if hint is bool:
        return str(not default).lower(), not default
    if hint is int:
        return str(default + 1), default + 1
    return ("0.5", 0.5) if default != 0.5 else ("0.25", 0.25)


@pytest.mark.parametrize("flag", study.RUN_FLAGS, ids=lambda flag: flag.key)
def test_each_setting_of_a_run_has_a_flag_that_sets_it(flag):
    hint = next((h for h in typing.get_args(flag.hint) if h is float), flag.hint)
    text, value = sample(hint, flag.default)
    for name in flag.names:
        parser = argparse.ArgumentParser()
        flags.add(parser, study.RUN_FLAGS)
        stated = flags.stated(parser.parse_args([name, text]), study.RUN_FLAGS)
        assert stated == {flag.key: value}
        run = flags.changed(RunSettings(), stated)
        for part in flag.key.split("."):
            run = getattr(run, part)
        assert run == value


def test_no_setting_of_a_run_lacks_a_flag():
    """A new field of the schema gets one by itself; those left out have words of their own."""
    top = {flag.key.split(".")[0] for flag in study.RUN_FLAGS}
    assert {f.name for f in dataclasses.fields(RunSettings)} - top == {
        *("corpus", "tokenizer", "model", "approach", "repeat")
    }


def test_help_tells_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in (*study.RUN_FLAGS, *study.TRAIN_FLAGS):
        assert flag.name in text
    assert "peak learning rate (default 0.0003)" in text and "--batch_size" not in text


@pytest.mark.parametrize("text, value", [("none", None), ("null", None), ("2.5", 2.5)])
def test_a_flag_of_an_optional_setting_takes_none(text, value):
    assert asked("--optimizer.clip-norm", text).run.optimizer.clip_norm == value


# ---------------------------------------------------------------------------------------------- the studies' commands


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


def test_the_fourth_studys_spellings_are_taken(here):
    words = "--dataset tinystories --data_path stories.txt --model_size small --max_steps 50 --batch_size 4".split()
    run = asked(*words).run
    assert run.model == PRESETS["study-small"] and run.budget.steps == 50 and run.global_batch == 4
    source = run.corpus.source
    assert (source.kind, source.files, source.separator) == ("files", ("stories.txt",), "<|endoftext|>")


@pytest.mark.parametrize("pair, approach", study.APPROACH_OF.items())
def test_dataset_type_and_pretokenized_name_an_approach(here, pair, approach):
    form, beforehand = pair
    words = ["--dataset-type", form, *(["--pretokenized"] if beforehand else [])]
    dataset = {"pretokenized-padded": PADDED, "token-list": LISTS}.get(approach, "web.parquet")
    assert asked("--dataset", dataset, *words).run.approach == approach
    if beforehand:
        assert asked("--dataset", "tinystories", *words).run.approach == approach, "a corpus is tokenized beforehand"


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


# -------------------------------------------------------------------------------------------------------- preset files


@pytest.mark.parametrize("name, weights", [("small", "study-small"), ("medium", "study-medium")])
def test_the_shipped_preset_files_are_the_studys(name, weights):
    file = study.read_file(str(Path(__file__).parents[2] / f"config/presets/{name}_model.yaml"))
    model = file.model_settings("x")
    assert dataclasses.replace(model, vocabulary_size=None) == PRESETS[weights] and model.vocabulary_size == 50_257
    assert file.values()["precision"] == "bf16" and file.values()["sequence_length"] == 1024
    assert file.training.batch_size * file.training.gradient_accumulation_steps == 32


def test_a_preset_file_becomes_settings(here):
    """`6e-4` and `no` are a text and a boolean to YAML 1.1."""
    assert yaml.safe_load(PRESET)["training"]["learning_rate"] == "6e-4"
    run = asked("--config", "preset.yaml", "--dataset", "web.parquet", "--world-size", "2").run
    assert (run.optimizer.learning_rate, run.budget.steps, run.schedule.warmup_steps) == (6e-4, 20, 4)
    assert (run.micro_batch, run.global_batch, run.sequence_length, run.precision) == (2, 12, 32, "fp32")
    assert (run.model.name, run.model.hidden, run.model.tied_embeddings) == ("preset", 128, True)
    assert run.tokenizer.kind == "bpe" and run.tokenizer.vocabulary_size == 300, "as many as the model states"
    assert run.tokenizer.learnt_from == run.corpus


def test_flags_go_before_the_preset_file(here):
    words = "--learning-rate 1e-3 --training-steps 9 --sequence-length 64 --precision bf16".split()
    run = asked("--config", "preset.yaml", *words).run
    assert (run.optimizer.learning_rate, run.budget.steps, run.sequence_length) == (1e-3, 9, 64)
    assert run.precision == "bf16" and run.schedule.warmup_steps == 4
    assert asked("--config", "preset.yaml", "--batch-size", "5").run.global_batch == 15
    assert asked("--config", "preset.yaml", "--global-batch", "7").run.global_batch == 7
    narrow = asked("--config", "preset.yaml", "--micro-batch", "1").run
    assert (narrow.micro_batch, narrow.global_batch) == (1, 6), "smaller passes, the same step"
    assert asked("--config", "preset.yaml", "--model", "llama-micro").run.model == PRESETS["llama-micro"]


def test_the_backend_is_the_devices_and_said_so(here):
    (here / "preset.yaml").write_text(PRESET.replace("gloo", "nccl"))
    import torch

    expected = not torch.cuda.is_available()
    assert any("nccl is stated" in note for note in asked("--config", "preset.yaml").notes) == expected


# ----------------------------------------------------------------------------------------------------------- preparing


def test_inputs_lie_where_the_workflow_puts_them_and_are_made_once(here):
    words = (
        "--dataset tinystories --tokenizer-name own --sequence-length 32 --validation.rows 2 --training-steps 3".split()
    )
    job = prepared(*words)
    own = "results/tokens/tinystories/own"
    assert {role: str(path) for role, path in job.manifests.items()} == {
        "store": f"{own}/packed-sequence_length=32/manifest.json",
        "validation_store": f"{own}/packed-split=validation-sequence_length=32/manifest.json",
    }
    assert Path("results/corpus/tinystories/manifest.json").is_file() and job.output.parent.parent == Path(
        "results/runs"
    )
    from tokenscale.settings import config

    settings = config.load()  # the very run that an experiment with these settings would have
    assert (job.run.corpus, job.run.tokenizer) == (settings.corpora["tinystories"], settings.tokenizers["own"])
    before = files(here)
    assert prepared(*words) == job and files(here) == before


def test_what_was_made_of_other_text_or_settings_is_made_again(here):
    words = "--dataset tinystories --tokenizer-name own --sequence-length 32 --validation.rows 0".split()
    manifests = prepared(*words).manifests
    before = files(here)
    (here / "stories.txt").write_text("<|endoftext|>".join(TEXTS[:90]))
    assert prepared(*words).manifests == manifests
    after = files(here)
    for name in ("corpus/tinystories", "tokenizers/own", "tokens/tinystories/own/packed-sequence_length=32"):
        assert after[f"results/{name}/manifest.json"] != before[f"results/{name}/manifest.json"], name


def test_a_file_of_ones_own_is_never_made_over_another(here):
    words = "--tokenizer-name bpe --sequence-length 32".split()
    first = prepared("--dataset", "web.parquet", *words)
    pq.write_table(pa.table({"text": TEXTS[:50]}), "web.parquet")
    second = prepared("--dataset", "web.parquet", *words)
    assert first.manifests["store"] != second.manifests["store"] and first.manifests["store"].is_file()
    assert first.run.corpus.name.startswith("web-") and len(first.run.corpus.name) == len("web-") + 6


def test_one_long_text_is_trained_on_without_validation(here):
    words = ["--dataset", "book.txt", "--tokenizer-name", "bpe", "--sequence-length", "32"]
    job = prepared(*words)
    assert any("--separator" in note for note in asked(*words).notes)
    assert job.run.validation.rows == 0 and job.run.corpus.validation_share == 0
    assert json.loads(job.manifests["store"].read_text())["documents"] == 1


@pytest.mark.parametrize("approach", APPROACHES)
@pytest.mark.parametrize("epochs", [1, 2.5])
def test_epochs_are_steps_over_all_rows_or_all_tokens(here, approach, epochs):
    form, beforehand = next(pair for pair, found in study.APPROACH_OF.items() if found == approach)
    words = ["--dataset-type", form, *(["--pretokenized"] if beforehand else []), "--epochs", str(epochs)]
    job = prepared(
        *["--dataset", "tinystories", "--tokenizer-name", "bpe", "--sequence-length", "32", "--batch-size", "5", *words]
    )
    from tokenscale.corpus.reader import RawText
    from tokenscale.tokenizer.load import load

    text = RawText(Path("results/corpus/tinystories"), "train")
    lengths = [1 + len(ids) for ids in load(Path("results/tokenizers/bpe")).encode_batch(list(*text.batches(1000)))]
    if approach in ("padding-free", "token-list"):
        expected = math.ceil(epochs * sum(lengths) / (5 * 32))
    elif approach == "packed":
        expected = math.ceil(epochs * json.loads(job.manifests["store"].read_text())["rows"] / 5)
    else:
        expected = math.ceil(epochs * len(lengths) / 5)
    assert job.run.budget.steps == expected


def test_a_failed_preparation_leaves_no_folder(here):
    (here / "half.jsonl").write_text('{"text": "a"}\n{"text": "b"}\nnot json\n')
    before = files(here)
    with pytest.raises(UserError, match="line 3"):
        prepared("--dataset", "half.jsonl", "--tokenizer-name", "bpe")
    assert files(here) == before and not list(here.glob("results/corpus/*"))


def test_a_corpus_from_elsewhere_is_downloaded_first(here, monkeypatch):
    """The order and the folders; downloading itself has tests of its own."""
    from tokenscale.corpus import download

    config = {
        "experiments": [],
        "corpora": {"far": {"source": {"files": "https://localhost/a.txt", "separator": "\n"}}},
    }
    (here / "config/config.yaml").write_text(json.dumps(config))

    def fetch(settings: CorpusSettings, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "a.txt").write_text("\n".join(TEXTS))
        from tokenscale.files import sha256_file, write_json

        path = directory / "a.txt"
        listed = {"name": "a.txt", "from": "x", "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        write_json(directory / "manifest.json", {"schema_version": 1, "kind": "url", "files": [listed]})

    monkeypatch.setattr(download, "fetch_corpus", fetch)
    job = prepared("--dataset", "far", "--tokenizer-name", "bpe", "--sequence-length", "32", "--validation.rows", "0")
    assert Path("results/downloads/far/a.txt").is_file()
    open_store(job.manifests["store"], job.run.store)


def test_starting_a_run_needs_neither_torch_nor_the_hosts_packages():
    forbidden = ["torch", "pydantic", "yaml", "snakemake", "duckdb", "tokenizers", "mistral_common"]
    code = f"import sys\nfor n in {forbidden!r}: sys.modules[n] = None\nimport tokenscale.commands.train"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_rule_of_the_workflow_depends_on_this():
    """What rank and pretokenize import decides what reruns."""
    from tokenscale.settings.closure import code_of
    from tokenscale.settings.registry import BATCHES, FORMATS

    own = {"study.py", "flags.py", "named.py", "outcome.py"}
    for code in (code_of("rank", *BATCHES.values()), code_of("pretokenize", *FORMATS.values()), code_of("launch")):
        assert not {Path(file).name for file in code} & own and not any("/commands/" in file for file in code)


# ------------------------------------------------------------------------------------------------------------- outcome


def test_an_outcome_sums_ranks_and_leaves_out_the_first_step_and_what_is_not_finite(tmp_path):
    record = provenance.start(tmp_path, {"attempt": 1})
    for rank in range(2):
        folder = tmp_path / f"attempt=01/rank={rank:05d}"
        folder.mkdir(parents=True)
        steps = [(9.0, 1, 5.0), (8.0, 3, 1.0 + rank), (6.0, 1, 1.0), (None, 1, 1.0)]
        lines = [
            {"step": k, "loss_sum": loss, "useful_tokens": n, "total_tokens": 4, "step_s": s, "nonfinite": loss is None}
            for k, (loss, n, s) in enumerate(steps)
        ]
        (folder / "steps.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert outcome.outcome(tmp_path) is None and "not sealed" in outcome.told(tmp_path)[0]
    provenance.seal(tmp_path, record, {"status": "nonfinite", "steps": 3})
    found = outcome.outcome(tmp_path)
    assert (found["loss"], found["status"], found["held_out_loss"]) == (6.0, "nonfinite", None)
    assert found["useful_tokens_per_s"] == pytest.approx((3 + 3 + 1 + 1) / (2.0 + 1.0))
    assert found["total_tokens_per_s"] == pytest.approx(16 / 3)


# ---------------------------------------------------------------------------------------------------- what is refused

REFUSED = {
    "--training-steps 0": ["--training-steps has no value '0'", "an integer ≥ 1"],
    "--learning-rate 0": ["--learning-rate", "a number > 0"],
    "--learning-rate nan": ["a number > 0"],
    "--learning-rate inf": ["a number > 0"],
    "--optimizer.beta2 1": ["a number ≥ 0, < 1"],
    "--optimizer.clip-norm -1": ["a number > 0, or none"],
    "--eos maybe": ["true or false"],
    "--precision fp16": ["'fp16'", "bf16, fp32"],
    "--schedule.shape cosin": ["did you mean 'cosine'"],
    "--model lama-micro": ["'lama-micro'", "--model", "did you mean 'llama-micro'"],
    "--model llama-micro --model-size small": ["both name the model"],
    "--epochs 1 --training-steps 3": ["--epochs and --training-steps"],
    "--batch-size 2 --global-batch 8": ["--batch-size and --global-batch"],
    "--gradient-accumulation-steps 2 --global-batch 8": ["--gradient-accumulation-steps and --global-batch"],
    "--world-size 3 --global-batch 2": ["--world-size", "3 ranks share 2 rows"],
    "--training-steps 3 --lr-warmup-steps 9": ["--lr-warmup-steps", "9 is more than"],
    "--storage.codec snappy": ["--storage.codec", "reads no Parquet store"],
    "--distributed": ["torchrun", "--world-size N"],
    "--dataset nofile.txt": ["is missing", "--dataset"],
    "--dataset web.parqet": ["did you mean 'web.parquet'"],
    "--dataset tinystory": ["no dataset 'tinystory'", "dummy, tinystories", "did you mean 'tinystories'"],
    "--dataset empty.txt": ["is empty"],
    "--dataset web.parquet --text-column txt": ["no column 'txt'", "--text-column", "did you mean 'text'"],
    "--dataset dummy --text-column body": ["--text-column means nothing"],
    "--dataset tinystories --separator x": ["--separator means nothing"],
    "--dataset web.parquet --data-path book.txt": ["--data-path means nothing"],
    "--dataset web.parquet --pretokenized": ["no manifest beside it", "web.manifest.json", "pretokenize"],
    f"--dataset {PADDED}": ["holds tokens, not text", "add --pretokenized"],
    f"--dataset {PADDED} --pretokenized --sequence-length 64": ["sequence_length", "64", "32", "--max-length 32"],
    f"--dataset {PADDED} --pretokenized --dataset-type token-list": ["wants format", "token-list", "padded"],
    f"--dataset {PADDED} --pretokenized --eos": ["wants eos", "True", "False"],
    f"--dataset {PADDED} --pretokenized --tokenizer-name tekken": ["wants tokenizer", "tekken", "bpe"],
    f"--dataset {PADDED} --pretokenized --validation.rows 4": ["--validation.rows", "results/tokens/"],
    f"--dataset {PADDED} --pretokenized --config preset.yaml --sequence-length 64": ["wants sequence_length"],
    "--dataset web.parquet --dataset-type token-list": ["allowed", "--dataset-type padding-free --pretokenized"],
    "--dataset tinystories --dataset-type packed --pretokenized": ["leave --pretokenized out"],
    "--dataset web.parquet --tokenizer-name nope": ["no tokenizer 'nope'", "bpe"],
    "--dataset web.parquet --config preset.yaml --tokenizer-name tekken": ["has 300", "has 131,072"],
    "--config none.yaml": ["is missing", "none.yaml"],
    "--config wrong.yaml": ["unknown key 'hiden_size'", "did you mean 'hidden_size'", "wrong.yaml"],
    "--config half.yaml": ["fp16", "use bf16"],
    "--config shape.yaml": ["--model", "heads"],
    "--config small.yaml --dataset web.parquet": ["--tokenizer-name", "at least 259"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_told_once_and_nothing_is_written(here, capsys, monkeypatch, words):
    monkeypatch.setattr("tokenscale.commands.train.start", lambda *_: pytest.fail("it was not refused"))
    (here / "empty.txt").touch()
    (here / "wrong.yaml").write_text("model: {hiden_size: 32}")
    (here / "half.yaml").write_text("distributed: {mixed_precision: fp16}")
    (here / "shape.yaml").write_text("model: {hidden_size: 32, num_heads: 3}")
    (here / "small.yaml").write_text(PRESET.replace("300", "200"))
    before = files(here)
    assert main(["train", *words.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("tokenscale: ") and message.count("tokenscale: ") == 1 and "Traceback" not in message
    for sentence in REFUSED[words]:
        assert sentence in message, message
    assert files(here) == before


def test_another_tokenizer_of_the_same_name_is_refused(here):
    words = ["--dataset", PADDED, "--pretokenized", "--tokenizer-name"]
    prepared(*words, "bpe")
    make_tokenizer(here / "elsewhere/bpe", make_corpus(here / "less", TEXTS[:9]), 300)
    with pytest.raises(UserError, match="tokenizer file, sha256"):
        prepared(*words, "elsewhere/bpe")


@pytest.mark.parametrize("words, device", [([], "auto"), (["--device", "cpu"], "cpu")])
def test_ranks_of_torchrun_join_on_the_device_that_the_flags_say(monkeypatch, words, device):
    from tokenscale.commands import together
    from tokenscale.commands import train as command

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    joined = []
    monkeypatch.setattr(together, "join", lambda *asked: joined.append(asked))
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    with pytest.raises(AttributeError):  # what came back is no world: further it does not go
        command.run(parser.parse_args(words))
    assert joined == [(2, device)]


def test_another_world_size_than_torchruns_is_refused(here):
    with pytest.raises(UserError, match="WORLD_SIZE=4"):
        asked("--world-size", "2", world_size=4)


def test_without_a_configuration_a_name_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no dataset 'tinystories'"):
        asked("--dataset", "tinystories")


def test_half_a_flag_is_none(capsys):
    """`--optimizer.w 0` would be taken for one of several by argparse's own rule."""
    with pytest.raises(SystemExit) as error:
        main(["train", "--optimizer.weight", "0"])
    assert error.value.code == 2 and "unrecognized arguments: --optimizer.weight" in capsys.readouterr().err
