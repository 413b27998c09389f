"""`train` with every flag: each pair of flags, approaches, objectives and layouts is trained, or
refused.

A covering array: every two levels of two factors occur together in at least one training, unless a
rule of REFUSALS forbids them. Forbidden pairs are run, too, and must be refused by one of these
rules.
"""

import argparse
import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch

from tests import logs
from tests.corpora import make_corpus, make_tokenizer
from tests.distributed.ranks import run_ranks
from tokenscale.cli.main import main
from tokenscale.cli.train import command as verb
from tokenscale.settings import source_studies
from tokenscale.settings.run import RunSettings
from tokenscale.train.parallel.world import World

pytestmark = [pytest.mark.experiment, pytest.mark.slow(120), pytest.mark.distributed]
COMMON = "--tokenizer-name bpe --sequence-length 32 --device cpu"
#: factor → its levels, each some flags. A level holds the flags that mean something together only
FACTORS = {
    "approach": (
        "--dataset-type packed --pretokenized",
        *("--dataset-type padded", "--dataset-type padding-free"),
        *(
            f"--dataset-type {name} --pretokenized"
            for name in ("padded", "token-list", "length-bucketed")
        ),
    ),
    "layout": (
        "",
        "--layout.data 2 --layout.bucket-megabytes 1 --layout.compression bf16 --layout.copies ddp",
        "--layout.shard 2 --layout.sharding zero1",
        "--layout.shard 2 --layout.sharding zero2",
        "--world-size 2 --layout.tensor 2",
        "--layout.pipeline 2 --layout.schedule zero-bubble",
        "--model_parallel_mode pipeline_parallel --layout.stages-per-rank 1",
    ),
    "objective": ("--objective causal", "--objective masked --masking.share 0.3"),
    "text": (
        "--dataset pairs --eos",
        "--dataset stories.jsonl --text-column story",
        "--dataset pairs --eos --labels target",
        "--dataset pairs.tsv --text-column de --target-column en --eos",
    ),
    "storage": (
        "",
        "--storage.codec zstd --storage.codec-level 9",
        "--storage.codec snappy --storage.dtype int64 --storage.row-group-rows 10",
        "--engine tokenizers",
        "--packing concatenate",
    ),
    "model": ("--model llama-tiny", "--model gpt2-tiny", "--model bert-tiny"),
    "precision": ("", "--precision bf16", "--precision fp16", "--precision bf16-true", "--float8"),
    "attention": (
        "",
        "--attention sdpa",
        "--document-mask",
        "--document-mask --attention varlen",
        "--attention flash",
    ),
    "memory": (
        "",
        "--loss-chunk 16 --activation-checkpointing block",
        "--loss-chunk 8 --activation-checkpointing selective",
    ),
    "optimizer": (
        "",
        "--optimizer.fused false --optimizer.clip-norm none --optimizer.weight-decay 0",
        "--learning-rate 1e-3 --optimizer.beta1 0.8 --optimizer.beta2 0.9 --optimizer.epsilon 1e-6",
    ),
    "schedule": (
        "",
        "--schedule.shape constant --schedule.warmup-steps 0",
        "--schedule.shape linear --schedule.floor 0 --lr-warmup-steps 1",
    ),
    "batch": (
        "--global-batch 4 --micro-batch 2",
        "--batch-size 3",
        "--batch-size 2 --gradient-accumulation-steps 2",
    ),
    "budget": (
        "--budget.steps 2",
        "--epochs 0.01",
        "--budget.useful-tokens 200",
        "--budget.flops 1e8 --lr-warmup-steps 1",
        "--budget.wall-s 0.01",
    ),
    "validation": (
        "--validation.rows 2 --validation.every 1 --validation.accuracy",
        "--validation.rows 0",
        (
            "--validation.rows 2 --validation.each-epoch --validation.at-start false "
            "--validation.at-end false"
        ),
        "--validation.rows 2 --validation.bleu 2 --validation.bleu-each-epoch",
    ),
    "checkpoints": (
        "",
        "--checkpoints.final false",
        "--checkpoints.every 1 --checkpoints.keep-last 2 --checkpoints.keep-resume-state",
        "--checkpoints.each-epoch --checkpoints.at-start --checkpoints.asynchronous false",
        "--checkpoints.best",
    ),
    "other": (
        "",
        "--prefetch --log-every 1 --garbage-every 1 --seed 3",
        "--profile.first 0 --profile.steps 1",
    ),
}
#: flags that no level has, and why
LEFT_OUT = {
    "optimizer.moments": "for precision bf16-true alone",
    "layout.accumulation_format": "for precision bf16-true alone; tests/distributed/test_accumulation_format.py",
    "arm": "needs the environment of another trainer; tests/unit/test_arms.py",
    "compile": "compiling takes a minute; tests/unit/test_models.py compares compiled blocks",
    "resume_from": "needs the state of another run; tests/faults/test_resume.py",
    **dict.fromkeys(
        (
            "layout.accumulation",
            "layout.gather",
            "layout.reshard_to",
            "layout.embedding_group",
            "layout.head_group",
        ),
        "settings of FSDP alone; tests/distributed/test_parity.py",
    ),
}

ORDER = {name: place for place, name in enumerate(FACTORS)}
Combination = dict[str, str]  # factor → level


def words(combination: Combination) -> list[str]:
    return f"{COMMON} {' '.join(combination.values())}".split()


#: what `train` says as it refuses → the command lines that it must refuse so. `--device cpu` is in
#: all of them
REFUSALS = {
    "does not read a Parquet store": lambda line: (
        "--storage." in line
        and not re.search(
            r"--dataset-type (padded|token-list|length-bucketed) --pretokenized", line
        )
    ),
    "does not pack documents": lambda line: (
        "--packing" in line and "--dataset-type packed" not in line
    ),
    "hold one document each": lambda line: (
        "--document-mask" in line
        and not re.search("--dataset-type (packed|padding-free|token-list)", line)
    ),
    "do not support document_mask": lambda line: "--document-mask" in line and "bert" in line,
    "run their own": lambda line: re.search("--attention (varlen|flash)", line) and "bert" in line,
    "needs a GPU, and device is cpu: use sdpa": lambda line: re.search(
        "--attention (varlen|flash)", line
    ),
    "needs a GPU, and device is cpu: remove float8": lambda line: "--float8" in line,
    "float8 layers cannot be sharded": lambda line: (
        "--float8" in line and "--layout.tensor" in line
    ),
    "which float8 would replace": lambda line: "--float8" in line and "zero-bubble" in line,
    "float8 products need 16 rows": lambda line: "--float8" in line and "--validation.bleu" in line,
    "models of transformers": lambda line: (
        "bert" in line and re.search(r"layout.tensor|layout.pipeline|model_parallel", line)
    ),
    "cuts pairs anywhere": lambda line: (
        "--labels target" in line and re.search("concatenate|padding-free|token-list", line)
    ),
    "chooses its own targets": lambda line: "--labels target" in line and "masked" in line,
    "are not pairs": lambda line: "--validation.bleu" in line and "stories.jsonl" in line,
    "cannot generate text": lambda line: "--validation.bleu" in line and "masked" in line,
    "needs a validation loss": lambda line: (
        "--checkpoints.best" in line and "--validation.rows 0" in line
    ),
}


def refusals(combination: Combination) -> list[str]:
    """Parts of the messages, one of which a combination must be refused with; none: it must
    train.
    """
    line = " ".join(combination.values())
    return [text for text, forbids in REFUSALS.items() if forbids(line)]


def pair_of(
    one: tuple[str, str], other: tuple[str, str]
) -> tuple[tuple[str, str], tuple[str, str]]:
    return (one, other) if ORDER[one[0]] < ORDER[other[0]] else (other, one)


def pairs_of(combination: Combination) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """Every two (factor, level) of a combination, in the order of FACTORS."""
    return set(itertools.combinations(((name, combination[name]) for name in FACTORS), 2))


def covering() -> tuple[list[Combination], list[Combination]]:
    """(combinations to train, in which every allowed pair occurs; one combination for each pair
    that is forbidden).
    """
    pick = random.Random(0)
    base = {name: levels[0] for name, levels in FACTORS.items()}
    assert not refusals(base)
    single = [base | {name: level} for name, levels in FACTORS.items() for level in levels]
    forbidden = [combination for combination in single if refusals(combination)]
    gone = {
        (name, level)
        for name, levels in FACTORS.items()
        for level in levels
        if refusals(base | {name: level})
    }
    missing = set()
    for one, other in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(
            *([(name, level) for level in FACTORS[name]] for name in (one, other))
        ):
            if refusals(base | dict(pair)):
                if not gone & set(pair):
                    forbidden += [base | dict(pair)]
            else:
                missing.add(pair)
    trained = []
    while missing:
        first = min(missing)
        found = base | dict(first)
        free = [name for name in FACTORS if name not in dict(first)]
        pick.shuffle(free)
        for place, name in enumerate(free):
            fixed = FACTORS.keys() - set(free[place:])
            allowed = [level for level in FACTORS[name] if not refusals(found | {name: level})]
            gain = {
                level: sum(
                    pair_of((name, level), (other, found[other])) in missing for other in fixed
                )
                for level in pick.sample(allowed, len(allowed))
            }
            found[name] = max(gain, key=gain.get)
        missing -= pairs_of(found)
        trained.append(found)
    return trained, forbidden


TRAINED, FORBIDDEN = covering()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder: stories, pairs in a file and in a configuration, and a small tokenizer of
    both.
    """
    root = tmp_path_factory.mktemp("place")
    texts = [f"document number {i} has some words, {'and more ' * (i % 17)}" for i in range(120)]
    pairs = [
        (f"Der Hund {i} sieht {'den ' * (i % 5)}Mann", f"Dog {i} sees {'the ' * (i % 5)}man")
        for i in range(80)
    ]
    (root / "stories.jsonl").write_text(
        "".join(json.dumps({"story": text}) + "\n" for text in texts)
    )
    (root / "pairs.tsv").write_text(
        "".join("\t".join(pair) + "\n" for pair in [("de", "en"), *pairs])
    )
    source = {"files": "pairs.tsv", "text_column": "de", "target_column": "en"}
    config = {"experiments": [], "corpora": {"pairs": {"source": source, "validation_share": 0.2}}}
    (root / "config").mkdir()
    (root / "config/config.yaml").write_text(json.dumps(config))
    make_tokenizer(
        root / "results/tokenizers/bpe",
        make_corpus(root / "corpus", [*texts, *map(" ".join, pairs)]),
        300,
    )
    return root


@pytest.fixture
def train(place, monkeypatch, capsys):
    """Call `train` up to the start of its ranks: (exit code, output, what the ranks would get, or
    None).
    """
    started = []

    def start(run, output, manifests) -> int:
        inputs = {
            role: (path if "store" in role else path.parent).resolve()
            for role, path in manifests.items()
        }
        # the ranks refuse these: they know the device
        if run.float8 or run.attention in ("varlen", "flash"):
            train_rank(
                World(0, 1, 0, torch.device("cpu")), run.to_json(), inputs, output.parent.resolve()
            )
        started.append((run.to_json(), inputs, output.parent.resolve()))
        return 0

    monkeypatch.chdir(place)
    monkeypatch.setattr("tokenscale.cli.train.command.start_run", start)
    monkeypatch.setattr("tokenscale.cli.train.command.print_summary", lambda folder: None)
    monkeypatch.setattr("tokenscale.cli.train.command.report_failure", lambda output: 0)

    def call(*arguments: str) -> tuple[int, str, tuple | None]:
        code = main(["train", *arguments])
        return code, "".join(capsys.readouterr()), started.pop() if started else None

    return call


def train_rank(world, settings: str, inputs: dict[str, Path], directory: Path) -> None:
    from tokenscale.data.batches.batch import Inputs
    from tokenscale.train import loop

    loop.train(RunSettings.from_json(settings), Inputs(**inputs), directory, world)


def train_all(world, jobs: list[tuple]) -> None:
    for settings, inputs, directory in jobs:
        train_rank(world, settings, inputs, directory)


def losses_of(directory: Path) -> list[float]:
    """The loss of each step of a run whose record is complete; empty where it is not."""
    record = directory / "run.json"
    if (
        not record.is_file()
        or json.loads(record.read_text()).get("outcome", {}).get("status") != "complete"
    ):
        return []
    return [
        step["loss_sum"] / step["useful_tokens"] for step in logs.read_steps(directory).values()
    ]


def test_every_flag_of_a_run_is_in_the_array_or_left_out_with_a_reason():
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    given = set()
    for level in (COMMON, *itertools.chain(*FACTORS.values())):
        given |= {
            key
            for key, value in vars(parser.parse_args(level.split())).items()
            if value is not None
        }
    assert {flag.key for flag in source_studies.RUN_FLAGS} - given == LEFT_OUT.keys()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_allowed_combinations_train(train, world_size):
    """All runs of a world size in the same processes, whose imports cost most."""
    jobs = []
    failed = {}
    for combination in (found for found in TRAINED if 1 + bool(found["layout"]) == world_size):
        line = " ".join(words(combination))
        code, output, job = train(*words(combination), "--output-dir", f"runs-{world_size}")
        if code != 0:
            failed[line] = output
        else:
            assert RunSettings.from_json(job[0]).layout.world_size == world_size, line
            jobs.append((line, job))
    assert failed == {} and len(jobs) > 5
    try:
        run_ranks(train_all, world_size, [job for _, job in jobs], timeout_s=900)
    finally:
        losses = {line: losses_of(job[2]) for line, job in jobs}
        print(
            "the first that did not end:", next((line for line in losses if not losses[line]), None)
        )
    assert all(found and all(map(math.isfinite, found)) for found in losses.values())


@pytest.mark.parametrize("combination", FORBIDDEN, ids=lambda c: " ".join(filter(None, c.values())))
def test_a_forbidden_combination_is_refused_in_one_message(train, combination):
    code, output, job = train(*words(combination))
    assert code == 2 and job is None, output
    assert output.count("tokenscale: ") == 1 and "Traceback" not in output
    assert any(text in output for text in refusals(combination)), output
