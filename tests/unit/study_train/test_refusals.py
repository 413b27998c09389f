"""What `train` refuses: told once, and nothing is written."""

import pytest

from tests.corpora import make_corpus, make_tokenizer
from tests.refusals import refused
from tests.unit.study_train.conftest import PADDED, PRESET, TEXTS, asked, prepared
from tokenscale.base.errors import UserError

REFUSED = {
    "--model lama-micro": ["'lama-micro'", "--model", "did you mean 'llama-micro'"],
    "--model llama-micro --model-size small": ["both name the model"],
    "--epochs 1 --training-steps 3": ["--epochs and --training-steps"],
    "--batch-size 2 --global-batch 8": ["--batch-size and --global-batch"],
    "--gradient-accumulation-steps 2 --global-batch 8": [
        "--gradient-accumulation-steps and --global-batch"
    ],
    "--world-size 3 --global-batch 2": ["--world-size", "3 ranks share 2 sequences"],
    "--training-steps 3 --lr-warmup-steps 9": ["--lr-warmup-steps", "9 is more than"],
    "--storage.codec snappy": ["--storage.codec", "does not read a Parquet store"],
    "--distributed": ["torchrun", "--world-size N"],
    "--dataset web.parqet": ["did you mean 'web.parquet'"],
    "--dataset web.parquet --text-column txt": [
        "no column 'txt'",
        "--text-column",
        "did you mean 'text'",
    ],
    "--dataset dummy --text-column body": ["--text-column does not apply"],
    "--dataset stories_only": ["it is a mixture", "`corpus` of an experiment"],
    "--dataset tinystories --separator x": ["--separator does not apply"],
    "--dataset web.parquet --data-path book.txt": ["--data-path does not apply"],
    "--dataset web.parquet --pretokenized": [
        "no manifest beside it",
        "web.manifest.json",
        "pretokenize",
    ],
    f"--dataset {PADDED}": ["holds tokens, not text", "add --pretokenized"],
    f"--dataset {PADDED} --pretokenized --sequence-length 64": [
        "sequence_length",
        "64",
        "32",
        "--max-length 32",
    ],
    f"--dataset {PADDED} --pretokenized --dataset-type token-list": [
        "wants format",
        "token-list",
        "padded",
    ],
    f"--dataset {PADDED} --pretokenized --eos": ["wants eos", "True", "False"],
    f"--dataset {PADDED} --pretokenized --tokenizer-name tekken": [
        "wants tokenizer",
        "tekken",
        "bpe",
    ],
    f"--dataset {PADDED} --pretokenized --validation.rows 4": [
        "--validation.rows",
        "results/tokens/",
    ],
    f"--dataset {PADDED} --pretokenized --config preset.yaml --sequence-length 64": [
        "wants sequence_length"
    ],
    "--dataset web.parquet --dataset-type token-list": [
        "allowed",
        "--dataset-type padding-free --pretokenized",
    ],
    "--dataset web.parquet --tokenizer-name nope": ["no tokenizer 'nope'", "bpe"],
    "--dataset web.parquet --config preset.yaml --tokenizer-name tekken": [
        "has 300",
        "has 131,072",
    ],
    "--dataset web.parquet --output-dir book.txt": ["--output-dir", "book.txt", "is a file"],
    "--dataset web.parquet --tokenizer-name bpe --labels target --eos": [
        "not pairs",
        "--target-column NAME",
    ],
    "--dataset web.parquet --target-column text": ["--eos", "end with EOS"],
    "--n_epochs 2 --epochs 3": ["--n-epochs and --epochs", "remove one of them"],
    "--model_max_length 32 --sequence-length 64": ["--model-max-length and --sequence-length"],
    "--model_parallel_mode pipeline": ["'pipeline'", "did you mean 'pipeline_parallel'"],
    "--n_chunk 4": ["--n-chunk", "--model-parallel-mode was not given"],
    "--n_chunk 4 --model_parallel_mode model_parallel": ["--model-parallel-mode model_parallel"],
    "--n_chunk 4 --model_parallel_mode pipeline_parallel --micro-batch 2": ["--micro-batch"],
    "--model_parallel_mode model_parallel --layout.schedule 1f1b": [
        "schedule naive only",
        "pipeline_parallel",
    ],
    "--model_parallel_mode model_parallel --world_size 1": ["at least 2 ranks", "--world-size 2"],
    "--model_parallel_mode pipeline_parallel --world_size 64": [
        "64 stages are more than the model's"
    ],
    f"--dataset {PADDED} --pretokenized --validation.bleu 4": ["--validation.bleu", "not pairs"],
    "--config none.yaml": ["is missing", "none.yaml"],
    "--config wrong.yaml": ["unknown key 'hiden_size'", "did you mean 'hidden_size'", "wrong.yaml"],
    "--config half.yaml": ["mixed_precision", "fp17"],
    "--config shape.yaml": ["--model", "heads"],
    "--config small.yaml --dataset web.parquet": ["--tokenizer-name", "at least 259"],
}


@pytest.fixture
def with_configurations(shared):
    """Files with a wrong key, a wrong value, a shape that cannot be, and a vocabulary that is too
    small.
    """
    (shared / "wrong.yaml").write_text("model: {hiden_size: 32}")
    (shared / "half.yaml").write_text("distributed: {mixed_precision: fp17}")
    (shared / "shape.yaml").write_text("model: {hidden_size: 32, num_heads: 3}")
    (shared / "small.yaml").write_text(PRESET.replace("300", "200"))
    return shared


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_told_once_and_nothing_is_written(
    with_configurations, capsys, monkeypatch, words
):
    monkeypatch.setattr(
        "tokenscale.cli.train.command.start_run", lambda *_, **__: pytest.fail("it was not refused")
    )
    message = refused(capsys, ["train", *words.split()], untouched=with_configurations)
    for sentence in REFUSED[words]:
        assert sentence in message, message


def test_another_tokenizer_of_the_same_name_is_refused(here):
    words = ["--dataset", PADDED, "--pretokenized", "--tokenizer-name"]
    prepared(*words, "bpe")
    make_tokenizer(here / "elsewhere/bpe", make_corpus(here / "less", TEXTS[:9]), 300)
    with pytest.raises(UserError, match="tokenizer file, sha256"):
        prepared(*words, "elsewhere/bpe")


def test_another_world_size_than_torchruns_and_a_name_without_a_configuration_are_refused(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="WORLD_SIZE=4"):
        asked("--world-size", "2", world_size=4)
    with pytest.raises(UserError, match="no dataset 'tinystories'"):
        asked("--dataset", "tinystories")
