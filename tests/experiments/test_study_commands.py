"""The studies' commands at toy size, each really run: from a file of text to a sealed run, by our
ranks or torchrun's.

What a command prints, and that runs of one size are the same run, whoever started their ranks.
"""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import logs, served
from tests.corpora import WORDS, make_corpus, make_tokenizer
from tokenscale.base.files import read_json, write_json
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.run import RunSettings

pytestmark = [pytest.mark.experiment, pytest.mark.slow(80), pytest.mark.distributed]
PRESET = """\
model: {vocab_size: 300, hidden_size: 32, num_layers: 2, num_heads: 2, max_seq_len: 32}
training: {batch_size: 2, gradient_accumulation_steps: 2, learning_rate: 6e-4, max_steps: 10000, warmup_steps: 2}
distributed: {mixed_precision: bf16}
"""
#: what a trainer's environment need not have
HOST_ONLY = ("yaml", "snakemake", "duckdb", "pandas", "matplotlib")
PADDED = (
    "--dataset out/train_data_tokenized_padded_snappy.parquet --dataset-type padded --pretokenized"
)
STEP_2 = (
    f"{PADDED} --sequence-length 32 --batch-size 2 --learning-rate 5e-5 --lr-warmup-steps 2 "
    "--training-steps 5"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder: text, a configuration with a toy `tinystories`, a small tokenizer, and
    pretokenized files.
    """
    root = tmp_path_factory.mktemp("place")
    pick = random.Random(0)
    texts = [" ".join(pick.choices(WORDS, k=pick.choice([3, 10, 30, 100]))) for _ in range(120)]
    pq.write_table(pa.table({"text": texts}), root / "train_data.parquet")
    (root / "stories.txt").write_text("<|endoftext|>".join(texts))
    (root / "preset.yaml").write_text(PRESET)
    stories = {"source": {"files": "stories.txt", "separator": "<|endoftext|>"}}
    write_json(
        root / "config/config.yaml", {"experiments": [], "corpora": {"tinystories": stories}}
    )
    make_tokenizer(root / "results/tokenizers/bpe", make_corpus(root / "corpus", texts), 300)
    (root / "blocked").mkdir()
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in HOST_ONLY)]
    (root / "blocked/sitecustomize.py").write_text("\n".join(lines))
    words = "--input-path train_data.parquet --output-dir out --tokenizer-name bpe --max-length 32"
    tokenscale(root, "pretokenize", f"{words} --format padded")
    return root


def environment(**extra: str) -> dict[str, str]:
    """Ours, without what a launcher of these tests may have set; ranks talk over the loopback
    interface.
    """
    left = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    return left | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | extra


def call(root: Path, argv: list[str], check: bool = True, python: str | None = None, **extra: str):
    """Ours and torchrun's ranks are forks of a process with their packages imported, but for
    another `python`.
    """
    python = python or served.python()
    options = {
        "cwd": root,
        "env": environment(PYTHON_EXEC=python, **extra),
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run([python, *argv], timeout=120, **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def tokenscale(
    root: Path, verb: str, words: str, *arguments, **extra: str
) -> subprocess.CompletedProcess:
    return call(root, ["-m", "tokenscale", verb, *words.split()], *arguments, **extra)


def trained(
    root: Path, done: subprocess.CompletedProcess
) -> tuple[RunSettings, list[float], list[int]]:
    """(settings, loss of each step, order digest of each step) of the run that a command says it
    made.
    """
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("run ")]
    directory = root / line.split()[1]
    record = read_sealed(directory / "run.json")
    assert record["outcome"]["status"] == read_json(directory / "done.json")["status"] == "complete"
    run = RunSettings.from_json(json.dumps(record["run"]))
    steps = logs.read_steps(directory).values()
    assert [step["rows"] for step in steps] == [
        run.global_batch
    ] * run.budget.steps and directory.name == run.identity
    losses = [step["loss_sum"] / step["useful_tokens"] for step in steps]
    return run, losses, [step["order_digest"] for step in steps]


def test_a_pretokenized_file_is_trained_on_without_the_hosts_packages_and_the_weights_write_text(
    place,
):
    """Step 2 of the first study, where YAML cannot be imported, by the ranks either.

    The checkpoint carries the tokenizer that lies beside the tokens: `generate` needs no further
    flag.
    """
    blocked = {
        "PYTHONPATH": os.pathsep.join([str(place / "blocked"), os.environ.get("PYTHONPATH", "")])
    }
    words = f"{STEP_2} --model llama-micro --output-dir blocked/runs"
    run, losses, digests = trained(
        place, tokenscale(place, "train", words, python=sys.executable, **blocked)
    )
    assert (run.approach, run.global_batch, run.layout.world_size) == ("pretokenized-padded", 2, 1)
    assert len(set(digests)) == 5 and all(4 < loss < 8 for loss in losses)
    again = tokenscale(place, "train", words)
    assert "has ended already" in again.stdout and "step 1/5" not in again.stdout
    assert trained(place, again) == (run, losses, digests)
    checkpoint = f"blocked/runs/{run.identity}/checkpoints/final"
    said = tokenscale(
        place, "generate", f"--checkpoint {checkpoint} --prompt the --max-new-tokens 5"
    ).stdout
    assert said.startswith("the") and len(said) > len("the\n")
    for verb, words, said in (
        ("evaluate", "--corpus train_data.parquet --text-column txt", "--text-column"),
        ("evaluate", "--rows 0", "--rows"),
        ("export", "--output stories.txt/a", "stories.txt"),
    ):
        refused = tokenscale(place, verb, f"--checkpoint {checkpoint} {words}", check=False)
        assert (
            refused.returncode == 2 and said in refused.stderr and "Traceback" not in refused.stderr
        )


@pytest.mark.long
def test_study_003s_two_modes_are_one_training(place):
    """Its model_parallel and pipeline_parallel, and one rank: the same samples, and losses but for
    rounding.
    """
    words = (
        "--dataset stories.txt --separator <|endoftext|> --dataset-type padded --tokenizer-name bpe"
    )
    words += (
        " --model llama-micro --model_max_length 32 --batch_size 8 --n_epochs 1 --validation.rows 0"
    )
    found = {}
    for mode in ("none", "model_parallel", "pipeline_parallel"):
        done = tokenscale(
            place, "train", f"{words} --model_parallel_mode {mode} --output-dir course"
        )
        run, losses, digests = trained(place, done)
        found[run.layout.method] = losses, digests
        assert run.budget.steps == 14 and run.global_batch == 8
    assert found.keys() == {"single", "naive", "gpipe"}
    for losses, digests in found.values():
        assert digests == found["single"][1] and losses == pytest.approx(
            found["single"][0], rel=1e-6
        )


def test_two_ranks_are_one_run_whoever_starts_them(place):
    """Our own launcher, one torchrun, and two of them as two nodes: equal digests, and losses to
    the last bit.
    """
    words = f"{STEP_2} --model llama-micro"
    own = trained(place, tokenscale(place, "train", f"{words} --world-size 2 --output-dir own"))
    module = ["-m", "tokenscale", "train", "--distributed", *words.split()]
    one = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *address()]
    torchrun = trained(place, call(place, [*one, *module, "--output-dir", "torchrun"]))
    assert own[0].layout.world_size == 2 and own[0].global_batch == 4
    assert torchrun == own
    node = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *address()]
    more = {"cwd": place, "env": environment(PYTHON_EXEC=served.python()), "text": True}
    more |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    commands = [
        [served.python(), *node, "--node-rank", str(k), *module, "--output-dir", "nodes"]
        for k in range(2)
    ]
    nodes = [subprocess.Popen(command, **more) for command in commands]
    texts = [process.communicate(timeout=120)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], "\n".join(texts)
    (text,) = [text for text in texts if "run    " in text]
    assert trained(place, subprocess.CompletedProcess([], 0, text)) == own


def address() -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ["--master-addr", "127.0.0.1", "--master-port", str(probe.getsockname()[1])]


def test_a_preset_file_trains_on_random_numbers(place):
    """The fourth study's first command, its data the default; a flag goes before the file."""
    words = "--config preset.yaml --dataset dummy --training-steps 4 --validation.rows 2"
    run, losses, _ = trained(place, tokenscale(place, "train", words))
    assert (run.corpus.source.kind, run.tokenizer.vocabulary_size, run.precision) == (
        "dummy",
        300,
        "bf16",
    )
    assert (run.global_batch, run.budget.steps) == (4, 4)
    assert abs(losses[0] - 5.7) < 0.2, "random numbers below 297 and three control ids: ln 300"


def test_a_mistake_ends_all_ranks_and_is_told_once(place):
    base = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": address()[-1],
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    command = [
        served.python(),
        "-m",
        "tokenscale",
        "train",
        *STEP_2.split(),
        "--model",
        "lama-micro",
    ]
    environments = [environment(**base, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    options = {"cwd": place, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=own, **options) for own in environments]
    first, second = (rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2], first
    assert "did you mean 'llama-micro'" in first and second == ""
    assert first.count("tokenscale: ") == 1 and "Traceback" not in first
