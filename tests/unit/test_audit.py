"""The audit of a loader names each planted fault, and accuses no honest variant."""

import itertools
import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.corpora import make_corpus, make_run, make_store, make_tokenizer
from tokenscale.base.errors import UserError
from tokenscale.cli.main import main
from tokenscale.data.audit import (
    FAILED,
    HELD,
    TITLES,
    UNKNOWN,
    AuditSettings,
    audit,
    read_samples,
)
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import open_batches
from tokenscale.settings.run import APPROACHES

LENGTH = 8
PAD = 0
IGNORED = -100
VOCABULARY = 2000
#: 96 samples of distinct ids, two of them shorter than the others
SAMPLES = [list(range(10 * n + 1, 10 * n + 1 + LENGTH - 3 * (n % 48 == 5))) for n in range(96)]
SETTINGS = AuditSettings(vocabulary_size=VOCABULARY, pad_id=PAD, global_batch=24)


def rows_of(samples, labels=True, shifted=True, mask=False, documents=False):
    """Return a batch of samples: ids, and labels of the next tokens."""
    ids = np.full((len(samples), LENGTH), PAD)
    targets = np.full((len(samples), LENGTH), IGNORED)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
        if shifted:
            targets[row, : len(sample) - 1] = sample[1:]
        else:
            targets[row, : len(sample)] = sample
    batch = {"input_ids": ids, "labels": targets}
    if not labels:
        del batch["labels"]
    if mask:
        batch["attention_mask"] = (ids != PAD).astype(int)
    if documents:
        batch["document_ids"] = np.zeros_like(ids)
    return batch


@dataclass
class Plan:
    """How the reference loader goes wrong; by default it does not."""

    order: object = None  # (epoch, seed) → numbers of the samples
    share: object = None  # (numbers of a global batch, rank, world size) → those of the rank
    change: object = None  # (batch, number of the batch, rank) → batch
    batches: object = None  # (list of global batches, rank, world size) → list
    resumed: object = None  # (step of the state) → step to go on at
    stateful: bool = True


def permutation(epoch, seed):
    return np.random.default_rng([seed, epoch]).permutation(len(SAMPLES)).tolist()


def contiguous(numbers, rank, world_size):
    return np.array_split(np.array(numbers), world_size)[rank].tolist()


class Reference:
    """A loader whose global batches are a function of seed, epoch and step."""

    def __init__(self, plan, rank, world_size, epoch, seed, batch_size):
        size = batch_size * world_size
        order = (plan.order or permutation)(epoch, seed)
        batches = [order[n : n + size] for n in range(0, len(order), size)]
        batches = plan.batches(batches, rank, world_size) if plan.batches else batches
        share = plan.share or contiguous
        self.parts = [share(numbers, rank, world_size) for numbers in batches]
        self.plan = plan
        self.rank = rank
        self.step = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.step == len(self.parts):
            raise StopIteration
        batch = rows_of([SAMPLES[n] for n in self.parts[self.step]])
        if self.plan.change:
            batch = self.plan.change(batch, self.step, self.rank)
        self.step += 1
        return batch

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        step = state["step"]
        self.step = self.plan.resumed(step) if self.plan.resumed else step


def maker(plan=None, wrap=lambda loader: loader):
    def make_loader(rank=0, world_size=1, epoch=0, seed=0, batch_size=24):
        return wrap(Reference(plan or Plan(), rank, world_size, epoch, seed, batch_size))

    return make_loader


def give(name, value):
    """Return a change of the first row of batches: `value` at a place of `name`."""

    def change(batch, step, rank):
        if step == 1:
            batch[name][0, 2] = value
        return batch

    return change


def unshifted(batch, step, rank):
    """Labels one token too far on."""
    batch["labels"] = np.roll(batch["labels"], -1, axis=1)
    return batch


def label_padding(batch, step, rank):
    padded = batch["input_ids"] == PAD
    batch["labels"][padded] = PAD
    return batch


def cross_documents(batch, step, rank):
    batch["document_ids"] = np.repeat([[0, 0, 0, 0, 1, 1, 1, 1]], len(batch["input_ids"]), axis=0)
    return batch


def cut_long(batch, step, rank):
    batch["input_ids"][:, LENGTH - 1] = PAD
    batch["labels"][:, LENGTH - 2 :] = IGNORED
    return batch


def drop_part_of_last(batches, rank, world_size):
    return batches[:-1]


def repeat_at_the_border(batches, rank, world_size):
    return [*batches, batches[0]]


def shorter_last_rank(batches, rank, world_size):
    return batches[:-1] if rank and rank == world_size - 1 else batches


def seeded_by_rank(batches, rank, world_size):
    draw = random.Random(rank)
    return [[draw.randrange(len(SAMPLES)) for _ in batch] for batch in batches]


def order_by_world(batches, rank, world_size):
    return batches[world_size % len(batches) :] + batches[: world_size % len(batches)]


def unseeded(epoch, seed):
    order = list(range(len(SAMPLES)))
    random.SystemRandom().shuffle(order)
    return order


def every_rank_all(numbers, rank, world_size):
    return numbers[: len(numbers) // world_size]


def share_of_rank_0(numbers, rank, world_size):
    return contiguous(numbers, 0 if rank == 1 else rank, world_size)


def overlapping(numbers, rank, world_size):
    own = contiguous(numbers, rank, world_size)
    return own if world_size == 1 or rank == 0 else [numbers[0], *own[1:]]


#: fault → (how the loader goes wrong, the property that must fail)
FAULTS = {
    "a sampler without set_epoch": (Plan(order=lambda e, s: permutation(0, s)), "epochs"),
    "a seed that is ignored": (Plan(order=lambda e, s: permutation(e, 0)), "seed"),
    "an order that nobody seeded": (Plan(order=unseeded), "seed"),
    "the last batch is dropped": (Plan(batches=drop_part_of_last), "samples"),
    "a sample that is never read": (
        Plan(order=lambda e, s: [n for n in permutation(e, s) if n != 7]),
        "samples",
    ),
    "a batch again at the end of the epoch": (Plan(batches=repeat_at_the_border), "samples"),
    "long samples are cut": (Plan(change=cut_long), "samples"),
    "every rank reads the same rows": (Plan(share=every_rank_all), "pass"),
    "a rank reads a row of another": (Plan(share=overlapping), "pass"),
    "two ranks have one share": (Plan(share=share_of_rank_0), "pass"),
    "ranks that draw for themselves": (Plan(batches=seeded_by_rank), "pass"),
    "a rank with a batch less": (Plan(batches=shorter_last_rank), "ranks"),
    "an order by world size": (Plan(batches=order_by_world), "batches"),
    "a resume one batch late": (Plan(resumed=lambda step: step + 1), "resume"),
    "a resume one batch early": (Plan(resumed=lambda step: step - 1), "resume"),
    "a resume from the beginning": (Plan(resumed=lambda step: 0), "resume"),
    "a buffer that is lost on resume": (
        Plan(resumed=lambda step: step if step < 2 else step + 1),
        "resume",
    ),
    "labels one token too far": (Plan(change=unshifted), "labels"),
    "a wrong label": (Plan(change=give("labels", 3)), "labels"),
    "labels on padding": (Plan(change=label_padding), "padding"),
    "an id outside the vocabulary": (Plan(change=give("input_ids", VOCABULARY)), "vocabulary"),
    "a label across documents": (Plan(change=cross_documents), "documents"),
}


def find_failed(make, samples=SAMPLES):
    found = audit(make, SETTINGS, samples)
    return {verdict.name for verdict in found.verdicts if verdict.answer == FAILED}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    plan, name = FAULTS[fault]
    assert name in find_failed(maker(plan))


def as_tuple(loader):
    return ((batch["input_ids"], batch["labels"]) for batch in loader)


def as_tensors(loader):
    import torch

    return ({name: torch.from_numpy(part) for name, part in batch.items()} for batch in loader)


def as_lists(loader):
    return ({name: part.tolist() for name, part in batch.items()} for batch in loader)


def by_step(rank=0, world_size=1, epoch=0, seed=0, step=0, batch_size=24):
    loader = Reference(Plan(), rank, world_size, epoch, seed, batch_size)
    loader.step = step
    return iter(list(loader))


def other_names(process_index=0, process_count=1, epoch=0, seed=0, rows=24, workers=2):
    return Reference(Plan(), process_index, process_count, epoch, seed, rows)


def change_to(**options):
    def change(batch, step, rank):
        samples = [[i for i in row if i != PAD] for row in batch["input_ids"].tolist()]
        return rows_of(samples, **options)

    return Plan(change=change)


HONEST = {
    "the reference": maker(),
    "pairs of arrays": maker(wrap=as_tuple),
    "tensors": maker(wrap=as_tensors),
    "lists": maker(wrap=as_lists),
    "a step as argument": by_step,
    "other names": other_names,
    "no labels": maker(change_to(labels=False)),
    "labels that the model shifts": maker(change_to(shifted=False)),
    "an attention mask": maker(change_to(mask=True)),
    "document ids": maker(change_to(documents=True)),
    "another order": maker(Plan(order=lambda e, s: permutation(e + 100, s))),
    "every n-th row": maker(Plan(share=lambda numbers, rank, world: numbers[rank::world])),
}


@pytest.mark.parametrize("variant", HONEST)
def test_an_honest_loader_is_not_accused(variant):
    assert find_failed(HONEST[variant]) == set()


def test_what_cannot_be_seen_is_said():
    def alone():
        return ({"input_ids": rows_of(SAMPLES[:4])["input_ids"]} for _ in range(3))

    found = audit(alone, AuditSettings())
    answers = {verdict.name: verdict.answer for verdict in found.verdicts}
    assert answers.pop("seed") == HELD
    assert set(answers.values()) == {UNKNOWN} and set(answers) == set(TITLES) - {"seed"}
    assert all(verdict.reason for verdict in found.verdicts if verdict.answer == UNKNOWN)


def test_a_loader_without_end_is_read_as_far_as_asked():
    def endless(rank=0, world_size=1, batch_size=24):
        draw = np.random.default_rng(rank)
        while True:
            yield draw.integers(1, 9, (batch_size, LENGTH))

    found = audit(endless, AuditSettings(worlds=(1, 2), most_batches=5))
    answers = {verdict.name: (verdict.answer, verdict.reason) for verdict in found.verdicts}
    assert answers["resume"][0] == UNKNOWN
    assert answers["samples"] == (UNKNOWN, "a pass has more than 5 batches, or no end (--batches)")
    assert answers["ranks"] == (HELD, "none has ended within 5")
    assert answers["batches"][0] == FAILED


@pytest.mark.parametrize("approach", APPROACHES)
def test_the_approaches_of_this_project_pass(approach, tmp_path):
    """In the first batches of a pass: it ends within a batch."""
    corpus = make_corpus(tmp_path / "corpus", [f"{n} and {n + 1} " * (n % 9) for n in range(90)])
    tokenizer = make_tokenizer(tmp_path / "tokenizer", corpus)
    run = make_run(approach, LENGTH, global_batch=SETTINGS.global_batch)
    store = make_store(tmp_path / "tokens", corpus, tokenizer, run.store) if run.store else None

    def make_loader(rank=0, world_size=1, step=0, seed=0):
        inputs = Inputs(corpus, tokenizer, store, rank=rank, world_size=world_size)
        batches = open_batches(replace(run, seed=seed), inputs)
        batches.seek({"step": step})
        for _ in range(step, 4):
            batch = batches.next().copy()
            yield {"input_ids": batch.tokens_bt, "labels": batch.labels_bt}

    found = audit(make_loader, replace(SETTINGS, vocabulary_size=300, pad_id=None))
    answers = {verdict.name: verdict.answer for verdict in found.verdicts}
    held = {"ranks", "pass", "batches", "seed", "resume", "labels", "vocabulary"}
    assert {name for name in answers if answers[name] == HELD} == held
    assert FAILED not in {answers[name] for name in set(answers) - {"epochs"}}


@pytest.mark.parametrize(("late", "answer"), [(0, HELD), (1, FAILED)])
def test_a_loader_without_end_is_resumed(late, answer):
    def endless(step=0):
        for number in itertools.count(step and step + late):
            yield np.full((2, LENGTH), number)

    found = audit(endless, AuditSettings(most_batches=5))
    assert {verdict.name: verdict.answer for verdict in found.verdicts}["resume"] == answer


def raise_error(rank=0):
    raise RuntimeError("no CUDA GPUs are available")


def raise_later():
    yield rows_of(SAMPLES[:4])
    raise OSError("the bucket is gone")


def wait_forever():
    import time

    yield time.sleep(60)


MISTAKES = {
    "it raises": (raise_error, "could not be made", "no CUDA GPUs are available"),
    "it exits": (lambda: sys.exit("giving up"), "could not be made", "SystemExit: giving up"),
    "it yields three arrays": (
        lambda: iter([tuple(np.zeros((3, 2, 4), int))]),
        "holds no ids",
        "int64 [3, 2, 4]",
    ),
    "it raises later": (raise_later, "failed at batch 1", "the bucket is gone"),
    "it never comes": (wait_forever, "failed at batch 0", "no batch in 1 s"),
    "it is a number": (lambda: 3, "cannot be iterated over", "not iterable"),
    "it is empty": (lambda: iter(()), "yields no rows", "rank 0 of 1"),
    "it yields texts": (lambda: iter([["a text"]]), "holds no ids", "integers [rows, T]"),
    "it yields other shapes": (
        lambda: iter([(np.zeros((2, 3), int), np.zeros((2, 4), int))]),
        "another shape",
        "[2, 4]",
    ),
    "it wants more": (lambda tokenizer: iter(()), "cannot give: tokenizer", "batch_size"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_loader_that_fails_is_one_message(mistake):
    make, what, fact = MISTAKES[mistake]
    with pytest.raises(UserError) as error:
        audit(make, AuditSettings(timeout_s=1))
    assert what in error.value.what
    assert fact in error.value.render() and error.value.facts["next"]


FORMS = {
    "lists": lambda rows: [row.tolist() for row in rows],
    "arrays": list,
    "one array": lambda rows: rows,
    "tensors": lambda rows: list(torch.tensor(rows)),
    "one tensor": torch.tensor,
    "int32": lambda rows: rows.astype(np.int32),
    "a generator": iter,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lost", [0, 3])
def test_samples_are_read_in_each_form_that_batches_have(form, lost):
    rows = np.arange(12 * LENGTH).reshape(12, LENGTH)
    samples = read_samples(lambda: FORMS[form](rows))
    found = audit(lambda: iter([rows[: 12 - lost]]), AuditSettings(), samples)
    (verdict,) = (verdict for verdict in found.verdicts if verdict.name == "samples")
    assert verdict.answer == (FAILED if lost else HELD)
    assert not lost or f"{lost * LENGTH} tokens are lost (25.00%)" in verdict.reason


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: [1, 2, 3], "int64 []"),
        (lambda: ["a text"], "<U6 []"),
        (lambda: [[1, 2], [0.5]], "float64 [1]"),
        (lambda: [np.zeros((2, 3), int)], "int64 [2, 3]"),
        (list, "nothing"),
        (lambda: None, "TypeError"),
        (lambda: raise_error(), "no CUDA GPUs are available"),
        (lambda: sys.exit("giving up"), "SystemExit: giving up"),
    ],
)
def test_samples_that_are_none_are_one_message(make, found):
    with pytest.raises(UserError) as error:
        read_samples(make)
    assert found in error.value.render() and error.value.facts["next"]


def test_rows_with_a_last_label_are_no_samples():
    rows = np.arange(6 * LENGTH).reshape(6, LENGTH)
    pairs = (rows[:, :-1], rows[:, 1:])
    found = audit(lambda: iter([pairs]), AuditSettings(), list(rows))
    (verdict,) = (verdict for verdict in found.verdicts if verdict.name == "samples")
    assert verdict.answer == FAILED and "a label alone is no part of a sample" in verdict.reason


@pytest.mark.parametrize("state", [{"epoch": 0}, None, 3, "text", np.arange(3)])
def test_a_state_behind_inputs_and_labels_is_no_part_of_a_batch(state):
    rows = np.arange(6 * LENGTH).reshape(6, LENGTH)
    found = audit(lambda: iter([(rows[:, :-1], rows[:, 1:], state)]), AuditSettings())
    verdicts = {verdict.name: verdict for verdict in found.verdicts}
    assert verdicts["labels"].answer == HELD


def test_a_list_of_rows_is_no_pair():
    rows = np.arange(3 * LENGTH).reshape(3, LENGTH)
    found = audit(lambda: iter([list(rows)]), AuditSettings())
    assert found.facts["positions"] == rows.size and found.facts["labels"] is None


def test_a_lost_row_is_counted_as_one():
    """Tokens of rows that are read twice would make up for equal tokens of lost ones."""

    def make(rank=0, world_size=1):
        rows = np.random.default_rng(0).integers(0, 20, (96, LENGTH))
        shared = range(0, 96, world_size)  # every rank reads those of rank 0
        yield from np.split(rows[list(shared)], 4)

    found = audit(make, AuditSettings(worlds=(2,)))
    reasons = {verdict.name: verdict.reason for verdict in found.verdicts}
    assert "at 2 ranks 48 rows are lost (50.00%), 48 are read once too often" in reasons["pass"]


class ReadOnce:
    """A loader with a state, which has no batches left at the end of its pass."""

    def __init__(self, shift=0):
        self.place = 0
        self.shift = shift

    def __iter__(self):
        while self.place < 9:
            self.place += 1
            yield {"input": np.full((2, LENGTH), self.place)}, np.full((2, LENGTH), self.place)

    def state_dict(self):
        return {"place": self.place + self.shift}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize(("shift", "said"), [(0, ""), (1, "reads batch 2 where batch 1 follows")])
def test_a_loader_that_is_read_once_is_resumed(shift, said):
    found = audit(lambda: ReadOnce(shift), AuditSettings())
    verdicts = {verdict.name: verdict for verdict in found.verdicts}
    assert verdicts["epochs"].answer == UNKNOWN
    assert verdicts["resume"].answer == (FAILED if shift else HELD)
    assert said in verdicts["resume"].reason
    assert verdicts["labels"].answer == HELD


def test_arguments_without_a_default_are_given():
    def make(rank, world_size, epoch, seed, step, batch_size):
        order = np.random.default_rng((seed, epoch)).permutation(48)
        for first in range(step, 48 // (batch_size * world_size)):
            rows = order[first * batch_size * world_size :][: batch_size * world_size]
            yield np.full((batch_size, LENGTH), rows[rank::world_size][:, None])

    found = audit(make, AuditSettings(worlds=(2,)))
    assert {verdict.answer for verdict in found.verdicts[:7]} == {HELD, UNKNOWN}


def test_a_batch_without_ids_is_described():
    with pytest.raises(UserError) as error:
        audit(
            lambda: iter([({"ids": np.zeros((2, 3), int)}, np.zeros((2, 3), int))]), AuditSettings()
        )
    assert error.value.facts["found"] == "a mapping with the keys 'ids'"


MODULE = """
import numpy as np

def make_loader(rank=0, world_size=1, epoch=0, seed=0, batch_size=24):
    order = np.random.default_rng([seed, epoch]).permutation(48)
    size = batch_size * world_size
    for first in range(0, len(order) - size + 1, size):
        rows = order[first : first + size][rank::world_size]
        yield {"input_ids": rows[:, None] * 10 + np.arange(8)[None]}

def _check(rows):
    return rows

def samples():
    return [[10 * n + k for k in range(8)] for n in range(%d)]
"""


def test_the_command_says_each_verdict_and_fails_where_one_that_was_asked_for_does(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_loader.py").write_text(MODULE % 50)
    call = ["audit", "my_loader:make_loader", "--samples", "my_loader:samples"]
    assert main([*call, "--output", "audit.json"]) == 1
    said = capsys.readouterr().out
    lost = "a pass reads every sample once: of 50 samples 16 tokens are lost"
    assert f"no           samples     {lost}" in said
    verdicts = json.loads(Path("audit.json").read_text())["verdicts"]
    assert {v["name"]: v["answer"] for v in verdicts}["batches"] == HELD
    assert main([*call, "--ask", "batches", "epochs"]) == 0
    answers = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[3:]]
    assert answers == [["yes", "batches"], ["yes", "epochs"]]
    assert main([*call, "--ask", "resume"]) == 1  # not checked: it has no state
    for wrong in (
        ["audit", "my_loader"],
        ["audit", "no_such_module:make"],
        ["audit", "my_loader:make_louder"],
        [*call, "--ask", "batchs"],
        [*call, "--worlds", "0"],
        ["audit", "my_loader.py:make_loader"],
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        said = capsys.readouterr()
        assert "next" in said.err and "Traceback" not in said.err and not said.out
        assert "_check" not in said.err
