"""Arms: other trainers as processes on the run's batches, and what becomes of one that does
something else.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import logs
from tests.corpora import Lab, make_run
from tokenscale.arms import environments
from tokenscale.arms.contract import Contract, digest_rows
from tokenscale.arms.environments import list_arms, load_arm, prepare
from tokenscale.arms.record import record
from tokenscale.arms.train import train, write_contract
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_sealed
from tokenscale.cli.parity import read_recording
from tokenscale.data.batches.batch import Batch, Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.data.stores.documents import IGNORED
from tokenscale.runs.records.events import Writer
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    ValidationSettings,
)
from tokenscale.train.parallel.world import World
from tokenscale.train.phase_timer import CudaTimer
from tokenscale.train.record import StepLog
from tokenscale.train.trainer import StepResult

T = 16
STEPS = 4
#: a trainer that only measures how often each token occurs; faults replace one line
ADAPTER = """
import time
import numpy as np
from contract import Contract

contract = Contract()
contract.require({"a head of its own": not contract.shape["tied_embeddings"] and contract.facts["seed"] == 77})
counts = np.ones(contract.vocabulary_size)
assert len(contract.weights_folder.joinpath("model.safetensors").read_bytes()) > 1000
before = time.monotonic()
for step in range(contract.steps):
    rows = contract.tokens[step]
    inputs, labels = rows[:, :-1], rows[:, 1:]
    loss = -np.log(counts[labels] / counts.sum()).mean()
    counts += np.bincount(labels.ravel(), minlength=len(counts)) * contract.learning_rates[step]
    now = time.monotonic()
    contract.log_step(loss=loss, tokens_bt=inputs, step_s=now - before, ended_mono_s=now)
    before = now
contract.close(words="counted")
"""
DESCRIPTION = "description: a trainer that counts\ntorch: false\n"
RECORD = Path("results/arms/toy/environment.json")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    texts = [
        f"document {number} has a few words of text, and the next one has others"
        for number in range(200)
    ]
    return Lab(tmp_path_factory.mktemp("lab"), texts, validation_share=0.1)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("arms/toy")
    folder.mkdir(parents=True)
    (folder / "arm.yaml").write_text(DESCRIPTION)
    (folder / "adapter.py").write_text(ADAPTER)
    (folder / "requirements.in").write_text("numpy\nsafetensors\n")
    Path("locks").mkdir()
    Path("locks/constraints.txt").write_text("")
    python = RECORD.with_name("environment") / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    write_sealed(RECORD, {"error": None, "files": {}, "packages": {}})
    return folder


def run_of(**changes) -> RunSettings:
    settings = {
        "arm": "toy",
        "labels": "stream",
        "packing": "concatenate",
        "model": replace(PRESETS["gpt2-micro"], maximum_positions=T),
        "global_batch": 6,
        "micro_batch": 3,
        "budget": BudgetSettings(steps=STEPS),
        "schedule": ScheduleSettings(warmup_steps=2),
        "optimizer": OptimizerSettings(learning_rate=0.5),
        "validation": ValidationSettings(rows=0),
    }
    return replace(make_run("packed", T), **(settings | changes))


def trained(lab: Lab, run: RunSettings, **options) -> dict:
    directory = Path("results/runs") / run.identity
    ranks = {"attempt": 0, "rank": 0, "world_size": 1} | options
    train(run, lab.store(run.store) / "manifest.json", RECORD, directory, **ranks)
    return read_json(directory / "run.json")


def validity(run: RunSettings) -> dict:
    entry = {"run_id": run.identity, "cell": {"arm": run.arm}, "repeat": 0, "position": 0}
    return logs.judge_one(entry, "toy", Path("results/runs"))[1]


def steps_of(run: RunSettings) -> list[dict]:
    path = Path("results/runs") / run.identity / "attempt=00/rank=00000/steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_arm_trains_on_the_batches_of_the_run_and_its_log_is_that_of_every_run(toy, lab):
    run = run_of()
    record = trained(lab, run)
    assert record["outcome"]["status"] == "complete" and record["arm"]["result"]["facts"] == {
        "words": "counted"
    }
    batches = open_batches(run, Inputs(store=lab.store(run.store) / "manifest.json"))
    steps = steps_of(run)
    assert len(steps) == STEPS
    for step in steps:
        batch = batches.next()
        assert step["order_digest"] == batch.order_digest
        assert step["rows"] == 6 and step["useful_tokens"] == step["total_tokens"] == 6 * T
    first = steps[0]["loss_sum"] / steps[0]["useful_tokens"]
    size = read_json(lab.tokenizer / "manifest.json")["vocabulary_size"]
    assert first == pytest.approx(np.log(size), rel=1e-6)  # nothing counted yet
    assert steps[-1]["loss_sum"] < steps[0]["loss_sum"]
    assert [step["learning_rate"] for step in steps[:2]] == [0.25, 0.5]
    assert not (
        Path("results/runs") / run.identity / "attempt=00/rank=00000/arm/tokens.npy"
    ).exists()
    row = validity(run)
    assert (row["validity"], row["reasons"], row["arm"]) == ("valid", "", "toy")


@pytest.mark.parametrize("logged, reason", [(0, "step_s falls short of t_mono_s"), ("paused", "")])
def test_time_between_two_steps_that_the_log_leaves_out_makes_a_run_invalid(
    toy, lab, logged, reason
):
    slow = "    time.sleep(0.02); paused = time.monotonic() - now; before = time.monotonic()"
    text = ADAPTER.replace("    before = now", slow).replace(
        "for step in", "paused = 0\nfor step in"
    )
    (toy / "adapter.py").write_text(
        text.replace("ended_mono_s=now", f"ended_mono_s=now, paused_s={logged}")
    )
    trained(lab, run_of())
    assert reason in validity(run_of())["reasons"] and bool(validity(run_of())["reasons"]) == bool(
        reason
    )


#: name → (line of the adapter, what stands there, words of the reason)
FAULTS = {
    "logs nothing": ("    contract.log_step(", "    dict(", "the arm logged no step"),
    "ends early": (
        "range(contract.steps)",
        "range(contract.steps - 1)",
        "the arm ended after 3 of 4 steps",
    ),
    "other batches": (
        "contract.tokens[step]",
        "contract.tokens[0]",
        "other batches than the run's in step 1",
    ),
    "shifted tokens": (
        "tokens_bt=inputs",
        "tokens_bt=labels",
        "other batches than the run's in step 0",
    ),
    "drops a row": (
        "tokens_bt=inputs",
        "tokens_bt=inputs[1:]",
        "in step 0: 5 sequences in place of 6",
    ),
    "fails": ("    now = ", "    1 / 0\n    now = ", "exit code 1): "),
    "too many steps": (
        "range(contract.steps)",
        "[0, 1, 2, 3, 3]",
        "the arm logged step 4 where step 4 of 4",
    ),
    "refuses": (
        'contract.facts["seed"] == 77',
        "False or True",
        "this trainer does not support: a head of its own",
    ),
    "is killed": (
        "    now = ",
        "    import os; os.kill(os.getpid(), 9)\n    now = ",
        "failed (signal 9)",
    ),
    "no numbers": (
        "    contract.log_step(",
        "    contract._log.write('hi\\n') or dict(",
        "line 1 of the arm's log is",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_arm_that_does_something_else_is_an_invalid_run_with_the_reason(toy, lab, fault):
    old, new, reason = FAULTS[fault]
    shape = PRESETS["llama-micro"] if fault == "refuses" else run_of().model
    assert old in ADAPTER
    (toy / "adapter.py").write_text(ADAPTER.replace(old, new))
    record = trained(lab, run_of(model=shape))
    assert record["outcome"]["status"] == "failed" and reason in record["outcome"]["reason"]


def test_an_arm_that_hangs_is_ended_with_its_children(toy, lab, tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    hang = (
        "    import os, subprocess, sys\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    open(os.environ['CHILD'], 'w').write(str(child.pid)); child.wait()\n    now = "
    )
    (toy / "adapter.py").write_text(ADAPTER.replace("    now = ", hang))
    record = trained(lab, run_of(), hang_s=1.0)
    assert "the arm hung: it wrote neither log nor output for 1 s" in record["outcome"]["reason"]
    state = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    # ended, whether or not collected
    assert not state.exists() or state.read_text().split(")")[1].split()[0] == "Z"


def test_a_run_of_two_ranks_that_compiles_is_recorded_on_one_that_does_not(toy, lab, tmp_path):
    run = run_of(
        arm="tokenscale",
        layout=LayoutSettings(data=2),
        compile=True,
        budget=BudgetSettings(steps=2),
    )
    assert record(run, lab.store(run.store) / "manifest.json", None, tmp_path / "recording") is None
    found = read_recording(tmp_path / "recording")
    assert len(found.steps) == 2 and len(found.floors) == 2


def test_a_loss_that_is_not_a_number_and_what_an_arm_sets_in_its_environment_are_recorded(
    toy, lab, monkeypatch
):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    own = (
        "import os; os.environ |= {'PYTORCH_ALLOC_CONF': 'expandable_segments:True', 'HF_TOKEN': "
        "'hf_secret'}\n"
    )
    (toy / "adapter.py").write_text(
        own + ADAPTER.replace("log_step(loss=loss", "log_step(loss=float('nan')")
    )
    run = run_of()
    record = trained(lab, run)
    assert record["outcome"]["status"] == "complete"
    assert all(step["nonfinite"] and step["loss_sum"] is None for step in steps_of(run))
    assert record["environment"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "HF_TOKEN" not in record["environment"]
    assert "expandable_segments" in validity(run)["environment"]  # which comparisons read


def test_what_cannot_start_is_the_reason(toy, lab):
    error = "the environment of toy could not be built: no gcc"
    with pytest.raises(UserError, match="number of started processes"):
        trained(lab, run_of(), world_size=2)
    rows = read_json(lab.store(run_of().store) / "manifest.json")["rows"]
    with pytest.raises(UserError, match="every label counts"):  # the last row is padded
        trained(lab, run_of(budget=BudgetSettings(steps=-(-rows // 6) + 1)))
    write_sealed(RECORD, {"error": error, "files": {}})
    assert trained(lab, run_of())["outcome"]["reason"] == error


def test_first_tokens_of_documents_count_in_a_stream_and_padding_does_not(lab):
    run = run_of(arm="tokenscale")
    store = lab.store(run.store) / "manifest.json"
    stream, documents = (
        open_batches(replace(run, labels=x), Inputs(store=store)) for x in ("stream", "all")
    )
    padded = differing = 0
    for _ in range(-(-read_json(store)["rows"] // 6)):
        a = stream.next()
        b = documents.next()
        assert (a.tokens_bt == b.tokens_bt).all() and a.order_digest == b.order_digest
        restored = a.labels_bt[:, :-1] != b.labels_bt[:, :-1]
        assert (a.labels_bt[:, :-1][restored] == a.tokens_bt[:, 1:][restored]).all()
        assert (b.labels_bt[b.labels_bt != a.labels_bt] == IGNORED).all()
        assert a.useful_tokens == np.count_nonzero(a.labels_bt != IGNORED)
        padded = padded + (a.useful_tokens < a.total_tokens)
        differing = differing + int(restored.sum())
    assert differing > 20 and padded <= 2  # the store's last row


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"labels": "all"}, "labels"),
        ({"packing": "best-fit"}, "labels"),
        ({"validation": ValidationSettings(rows=4)}, "validation.rows"),
        ({"precision": "fp16"}, "precision"),
        ({"document_mask": True}, "document_mask"),
        ({"model": replace(PRESETS["gpt2-micro"], dropout=0.1)}, "model.dropout"),
    ],
)
def test_settings_that_other_trainers_do_not_take_are_named(changes, word):
    assert run_of().problems() == [] and word in dict(run_of(**changes).problems())


def test_rows_are_hashed_without_their_order():
    rows = np.arange(12).reshape(3, 4)
    assert digest_rows(rows) == digest_rows(rows[::-1].astype(np.int32)) != digest_rows(rows[:2])
    assert digest_rows(rows) != digest_rows(rows[:, ::-1])


@pytest.fixture
def installed(toy, monkeypatch):
    commands = []
    run = environments._run

    def note(command, cwd=None):
        commands.append(list(map(str, command)))
        return run(command, cwd) if "git" in commands[-1][0] else "numpy==2.0\n"

    monkeypatch.setattr(environments, "_run", note)
    return commands


def test_an_environment_is_built_once_and_again_when_its_requirements_change(toy, installed):
    found = prepare("toy", RECORD, log=print)
    assert found["error"] is None and found["packages"] == {"numpy": "2.0"}
    assert any("install" in command and "torch" not in command for command in installed)
    before = RECORD.read_bytes()
    installed.clear()
    (toy / "adapter.py").write_text(ADAPTER + "\n# edited\n")
    prepare("toy", RECORD, log=print)
    assert not any("install" in command for command in installed)
    assert RECORD.read_bytes() != before  # the runs of another adapter are other runs
    (toy / "requirements.in").write_text("numpy\n")
    prepare("toy", RECORD, log=print)
    assert any("install" in command for command in installed)


def repository(folder: Path) -> tuple[str, str]:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
        ).stdout

    folder.mkdir()
    git("init", "--quiet", "-b", "main")
    (folder / "train.py").write_text("print()\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    git("bundle", "create", "--quiet", "../toy.bundle", "main")
    return git("rev-parse", "HEAD").strip(), git("rev-parse", "HEAD^{tree}").strip()


@pytest.mark.parametrize("bundle", [False, True])
def test_a_source_is_that_of_the_pinned_tree_from_either_place(
    toy, installed, tmp_path, monkeypatch, bundle
):
    commit, tree = repository(tmp_path / "upstream")
    monkeypatch.delenv(environments.BUNDLES, raising=False)
    if bundle:
        monkeypatch.setenv(environments.BUNDLES, str(tmp_path))
    url = "https://localhost:1/none" if bundle else str(tmp_path / "upstream")
    (toy / "arm.yaml").write_text(
        f"{DESCRIPTION}repository: {{url: '{url}', commit: {commit}, tree: {tree}}}\n"
    )
    assert prepare("toy", RECORD, log=print)["source"]["tree"] == tree
    assert (RECORD.parent / "source/train.py").is_file()
    other = "a" * 40
    (toy / "arm.yaml").write_text(
        f"{DESCRIPTION}repository: {{url: '{url}', commit: {commit}, tree: {other}}}\n"
    )
    assert (
        f"the source has tree {tree}, expected {other}"
        in prepare("toy", RECORD, log=print)["error"]
    )


def test_what_cannot_be_built_is_an_error_in_the_record(toy, monkeypatch, tmp_path):
    (toy / "arm.yaml").write_text(DESCRIPTION + "programs: [no-such-compiler]\n")
    assert "no-such-compiler not found on the PATH" in prepare("toy", RECORD, log=print)["error"]
    monkeypatch.setenv(environments.BUNDLES, str(tmp_path / "nowhere"))
    tree = "{url: 'https://localhost:1/none', commit: a, tree: b}"
    (toy / "arm.yaml").write_text(f"{DESCRIPTION}repository: {tree}\n")
    assert "git fetch" in prepare("toy", RECORD, log=print)["error"]
    monkeypatch.setattr(environments, "LIMIT_S", 0)
    assert "did not end within 0 s" in prepare("toy", RECORD, log=print)["error"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("toy", "torch: false\n", "no description"),
        ("toy", DESCRIPTION + "colour: blue\n", "colour"),
        ("toy", DESCRIPTION + "repository: {url: x}\n", "url, commit and tree"),
        ("toy", DESCRIPTION + "torch: 1: 2\n", "not valid YAML"),
        ("toi", DESCRIPTION, "'toy'"),
    ],
)
def test_a_malformed_description_or_an_unknown_arm_is_one_message(toy, name, text, message):
    (toy / "arm.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_arm(name)


def test_every_arm_is_described_and_pinned(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    for folder in (load_arm(name).folder for name in list_arms()):
        files = set(os.listdir(folder))
        assert {"arm.yaml", "adapter.py", "requirements.in", "README.md"} <= files
        locks = [file for file in files if file.endswith(".txt")]
        assert locks and all("--hash=sha256:" in (folder / lock).read_text() for lock in locks)


class FakeEvent:
    def __init__(self, enable_timing=False):
        pass

    def record(self, stream=None):
        self.at = time.monotonic()

    def synchronize(self):
        FakeEvent.waits += 1

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def waits(monkeypatch):
    """A function that returns how often it was waited for the device since its last call; the CPU
    is in its place.
    """
    counts = {"cuda": 0}
    FakeEvent.waits = 0
    for name in ("item", "tolist", "cpu", "__float__", "__int__", "__bool__"):
        method = getattr(torch.Tensor, name)

        def counted(self, method=method):
            counts["cuda"] += 1
            return method(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: FakeEvent().synchronize())

    def take() -> int:
        found, counts["cuda"], FakeEvent.waits = counts["cuda"] + FakeEvent.waits, 0, 0
        return found

    return take


def test_an_arm_waits_for_its_device_as_often_as_we_do(tmp_path, lab, waits):
    run = run_of(budget=BudgetSettings(steps=15), log_every=5)
    steps = 15
    model = torch.nn.Embedding(300, 300)
    optimizer = torch.optim.SGD(model.parameters())
    write_contract(
        run, open_batches(run, Inputs(store=lab.store(run.store))), tmp_path / "arm", device="cuda"
    )
    contract = Contract(str(tmp_path / "arm/contract.json"))
    contract.watch(model, optimizer)
    waits()
    for step in range(steps):
        tokens = torch.from_numpy(contract.tokens[step].astype(np.int64))
        loss = torch.nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        contract.loss(loss)
        loss.backward()
        optimizer.step()
    contract.close()
    theirs = waits()
    lines = [json.loads(line) for line in (tmp_path / "arm/steps.jsonl").read_text().splitlines()]
    assert [line["rows"] for line in lines] == [6] * steps and all(
        line["step_s"] > 0 for line in lines
    )
    batch = Batch.from_arrays(*np.ones((2, 6, T), dtype=np.int64), 0)
    device = torch.device("cuda")
    one = torch.ones(())
    log = StepLog(
        Writer(tmp_path / "ours"), timer := CudaTimer(device), World(0, 1, 0, device), scaled=False
    )
    waits()
    for step in range(steps):
        log.add(step, batch, 1e-3, 1, StepResult(one, one, one, one * 0, one))
        timer.end()
        if len(log) >= run.log_every or not step:
            log.read()
    log.read()
    # an event and one copy in each read: of the first step, of every fifth, of the last
    assert theirs == waits() == 2 * 4
