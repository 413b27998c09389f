"""Faults of an experiment's design, each with its problem; and designs that nothing is wrong
with.
"""

import itertools
import random
from dataclasses import replace

import pytest

from tests.operations import count_operations
from tokenscale.base.errors import UserError
from tokenscale.base.wording import listing
from tokenscale.referee.design import (
    Design,
    check_compound_levels,
    check_confounding,
    check_loss_units,
    check_repeated_data,
    find_problems,
)
from tokenscale.referee.readings import CorpusSize, read_texts
from tokenscale.settings import experiments
from tokenscale.settings.experiments import (
    Experiment,
    PrimaryComparison,
    describe_primary,
    merge_settings,
)
from tokenscale.settings.machine import Machine
from tokenscale.settings.options import decode
from tokenscale.settings.run import RunSettings

RUNS = {
    "sequence_length": 64,
    "global_batch": 8,
    "micro_batch": 1,
    "budget": {"steps": 20},
    "validation": {"rows": 0},
}
#: 1000 documents with 64,000 tokens: 1000 rows of any kind
TEXTS = {("docstrings", "tekken", eos): CorpusSize(1000, 64_000) for eos in (False, True)}


def design(
    factors, runs=(), texts=TEXTS, repeats=10, left_out=(), question="?", figures=(), **machine
) -> Design:
    left = tuple(experiments.LeftOut(cells, "-") for cells in left_out)
    experiment = Experiment(
        question, factors=factors, repeats=repeats, left_out=left, figures=tuple(figures)
    )
    table = []
    for position, (cell, repeat) in enumerate(experiments.order_runs(experiment)):
        values = merge_settings(merge_settings(RUNS, dict(runs)), {"repeat": repeat})
        for key, level in cell.items():
            experiments.set_dotted(values, key, level)
        table.append(experiments.Run(decode(RunSettings, values), cell, repeat, position))
    return Design(experiment, table, texts, **machine)


def said(*arguments, level=None, **keywords) -> list[tuple[str, str]]:
    """(level, what) of each problem."""
    return [
        (o.level, o.what)
        for o in find_problems(design(*arguments, **keywords))
        if level in (None, o.level)
    ]


APPROACHES = ["padded", "pretokenized-padded"]
DIAGONAL = [
    {"layout.data": n, "global_batch": b} for n in (1, 2, 4) for b in (8, 16, 32) if b != 8 * n
]
WEAK = {"layout.data": [1, 2, 4], "global_batch": [8, 16, 32]}
LARGE = {key: CorpusSize(10**6, 10**9) for key in TEXTS}
FEW = {key: CorpusSize(1000, 6400) for key in TEXTS}
#: one micro-step, since sums of gradients are rounded
IN_BF16 = {"precision": "bf16-true", "micro_batch": 8}
TOGETHER = {"approach": APPROACHES, "micro_batch": [1, 2], "sequence_length": [64, 128]}
RANKS = {"layout.data": [1, 2, 4]}
RATES = [{"learning_rate": 0.1}, {"learning_rate": 0.2, "weight_decay": 0.3}]
SCHEDULES = [
    {"pipeline": n, "schedule": s}
    for n, s in ((2, "naive"), (2, "gpipe"), (4, "gpipe"), (4, "1f1b"))
]
#: in no two cells of which one of the factors differs alone
MIXED = {"precision": ["fp32", "bf16"], "micro_batch": [1, 2], "sequence_length": [64, 128, 256]}
CELLS = [("fp32", 1, 64), ("fp32", 1, 256), ("bf16", 2, 64), ("bf16", 2, 128), ("bf16", 1, 128)]
OTHERS = [
    dict(zip(MIXED, cell, strict=True))
    for cell in itertools.product(*MIXED.values())
    if cell not in CELLS
]
#: the ETH study, 1.8 no. 1: at batch 1 one approach was at another sequence length
STUDY = {
    "approach": ["padding-free", "token-list"],
    "micro_batch": [1, 2],
    "sequence_length": [2048, 4096],
}
NOT_RUN = [
    {
        "approach": a,
        "micro_batch": b,
        "sequence_length": 2048 if (a, b) == ("padding-free", 1) else 4096,
    }
    for a, b in itertools.product(STUDY["approach"], (1, 2))
]
#: level of the one problem of that level, words of it, factors of the design and the rest of it;
#: `key` is the problem's
FAULTS = [
    ("refuse", "no two cells differ in precision alone", MIXED, {"left_out": OTHERS}),
    (
        "refuse",
        "micro_batch never changes alone: sequence_length changes with it",
        TOGETHER,
        {
            "key": "factors.micro_batch",
            "left_out": [
                {"micro_batch": 1, "sequence_length": 64},
                {"micro_batch": 2, "sequence_length": 128},
            ],
        },
    ),
    (
        "refuse",
        "cell approach=padding-free, micro_batch=1, sequence_length=4096 differs from every other",
        STUDY,
        {"key": "left_out", "left_out": NOT_RUN},
    ),
    (
        "refuse",
        "layout.data never changes alone",
        {"layout.data": [1, 2, 4], "global_batch": [8, 16, 20]},
        {
            "left_out": [
                {"layout.data": n, "global_batch": b}
                for n in (1, 2, 4)
                for b in (8, 16, 20)
                if b != {1: 8, 2: 16, 4: 20}[n]
            ]
        },
    ),
    (
        "warn",
        "learning_rate and weight_decay together",
        {"optimizer": RATES},
        {"key": "factors.optimizer"},
    ),
    (
        "warn",
        "grows with the world size (weak scaling)",
        WEAK,
        {
            "key": "factors.global_batch",
            "left_out": DIAGONAL,
            "texts": LARGE,
            "runs": {"budget": {"useful_tokens": 10}},
        },
    ),
    (
        "note",
        "8 rows at the smallest world size and 2 at the largest",
        RANKS,
        {"runs": {"micro_batch": 8}},
    ),
    (
        "warn",
        "no cell at world size 1",
        {"layout.data": [2, 4]},
        {"figures": ["scaling_throughput"]},
    ),
    (
        "refuse",
        "begin at different world sizes, 1 and 2",
        {"approach": APPROACHES, **RANKS},
        {
            "figures": ["scaling_throughput"],
            "left_out": [{"layout.data": 1, "approach": APPROACHES[1]}],
        },
    ),
    ("warn", "it is compared with padding-free", {"approach": ["padded", "token-list"]}, {}),
    (
        "warn",
        "4 ranks have no cell with schedule naive",
        {"layout": SCHEDULES},
        {"figures": ["pipeline_bubble"]},
    ),
    (
        "refuse",
        "budgets of different kinds: steps and useful_tokens",
        {"budget": [{"steps": 20}, {"useful_tokens": 1000}]},
        {},
    ),
    (
        "warn",
        "not mean equal tokens: 10,240 to 20,480",
        {"sequence_length": [64, 128]},
        {"texts": LARGE},
    ),
    ("note", "approaches differ in useful tokens", {"approach": ["padded", "packed"]}, {}),
    (
        "warn",
        "packed repeat it; their training loss",
        {"approach": ["padded", "packed"]},
        {"texts": FEW},
    ),
    ("note", "not known before the tokens of docstrings/tekken are built", {}, {"texts": {}}),
    (
        "warn",
        "second moment in bf16 never decays",
        {},
        {
            "runs": {**IN_BF16, "optimizer": {"beta2": 0.999}},
            "key": "runs.optimizer.moments",
        },
    ),
    (
        "warn",
        "mostly rounded away",
        {},
        {"runs": {**IN_BF16, "optimizer": {"learning_rate": 2e-5}}},
    ),
    (
        "warn",
        "gradients of 8 micro-steps are added in bf16",
        {"micro_batch": [1, 2, 8]},
        {"runs": {"precision": "bf16-true"}},
    ),
    (
        "note",
        "not known beforehand whether data are repeated",
        {},
        {"runs": {"budget": {"useful_tokens": 9}}},
    ),
    (
        "note",
        "runs at world size 1 and 2 leave GPUs of a 4-GPU node idle",
        {"layout.data": [1, 2, 4, 8]},
        {"machine": Machine(gpus_per_node=4), "gpus": 0},
    ),
]


@pytest.mark.parametrize(
    ("level", "words", "factors", "more"), FAULTS, ids=[words for _, words, *_ in FAULTS]
)
def test_a_fault_of_a_design_is_named_with_its_key_and_a_next_step(level, words, factors, more):
    changes = {name: value for name, value in more.items() if name != "key"}
    (found,) = [
        problem for problem in find_problems(design(factors, **changes)) if problem.level == level
    ]
    assert (
        words in found.what and found.next and found.key and found.key == more.get("key", found.key)
    )


@pytest.mark.parametrize(
    ("factors", "more"),
    [
        ({"approach": APPROACHES}, {}),
        ({}, {"runs": IN_BF16}),
        (
            {},
            {"runs": {**IN_BF16, "optimizer": {"beta2": 0.999, "moments": "fp32"}}},
        ),
        (
            {"micro_batch": [1, 2]},
            {
                "runs": {
                    "precision": "bf16-true",
                    "optimizer": {"moments": "fp32"},
                    "layout": {"accumulation_format": "fp32"},
                }
            },
        ),
        ({}, {"runs": {"optimizer": {"beta2": 0.999, "learning_rate": 2e-5}}}),
        ({"approach": APPROACHES, "micro_batch": [1, 2]}, {}),
        (STUDY, {"texts": LARGE, "runs": {"budget": {"epochs": 0.1}}}),
        (
            {
                "layout": [{"data": 2}, {"tensor": 2}, {"pipeline": 2, "schedule": "gpipe"}],
                "micro_batch": [1, 2],
            },
            {},
        ),
        ({"model": [{"layers": 2, "hidden": 512}, {"layers": 4, "hidden": 1024}]}, {}),
        ({}, {}),
        ({}, {"repeats": 1}),
        ({"optimizer": [{"learning_rate": 0.1}, {"learning_rate": 0.2}]}, {}),
        ({"layout.data": [1, 2, 4]}, {"runs": {"micro_batch": 2}}),
        ({"approach": APPROACHES, "layout.data": [2, 4]}, {}),  # nothing of efficiency is drawn
        ({"layout": SCHEDULES[:2]}, {"figures": ["pipeline_bubble"]}),
        ({"sequence_length": [64, 128]}, {"runs": {"budget": {"epochs": 0.5}}}),
        ({"budget.steps": [20, 40]}, {}),
        ({"layout.data": [4, 8]}, {"machine": Machine(gpus_per_node=4), "gpus": 0}),
        ({"layout.data": [1, 2]}, {"machine": Machine(gpus_per_node=4), "gpus": 0}),
    ],
)
def test_nothing_is_said_of_a_clean_design(factors, more):
    assert said(factors, **more) == []


def test_weak_scaling_by_keys_that_move_together_is_one_factor():
    together = {"layout.data, global_batch": [[1, 8], [2, 16], [4, 32]], "approach": APPROACHES}
    found = said(together, texts=LARGE, question="weak scaling", figures=["scaling_throughput"])
    assert [what for _, what in found if "equal tokens" not in what] == []
    assert any("grows with the world size" in what for _, what in said(together, texts=LARGE))
    keys = "layout.data, global_batch, optimizer.learning_rate"
    both, apart = (
        {keys: levels}
        for levels in ([[1, 8, 0.1], [2, 16, 0.2]], [[1, 8, 0.1], [2, 16, 0.1], [2, 16, 0.2]])
    )
    for factors, confounded in ((both, True), (apart, False)):
        found = said(factors, texts=LARGE, question="weak")
        assert (
            any("layout.data and optimizer.learning_rate together" in what for _, what in found)
            == confounded
        )


def weak_on(documents, tokens):
    texts = dict.fromkeys(TEXTS, CorpusSize(documents, tokens))
    return said(
        WEAK, left_out=DIAGONAL, texts=texts, question="weak", runs={"budget": {"steps": 50}}
    )


def test_data_that_only_the_larger_world_sizes_repeat_are_refused():
    """1.8, no. 2: 1000 steps were 4 epochs on 4 GPUs, and 16 on 16."""
    (refused,) = [what for level, what in weak_on(600, 600 * 64) if level == "refuse"]
    assert (
        "read their text up to 2.7 times and others less than once: global_batch=16 and "
        "global_batch=32"
    ) in refused
    assert not [what for _, what in weak_on(10_000, 640_000) if "times" in what]
    assert any(level == "warn" and "4 to 16 times" in what for level, what in weak_on(100, 6400))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"approach": "padded"}, 160 / 1000),
        ({"approach": "padding-free"}, 160 * 64 / 32_000),
        ({"approach": "packed"}, 160 / 700),
        ({"approach": "packed", "sequence_length": 128}, 160 * 128 / 32_000),
        ({"approach": "packed", "budget": {"epochs": 3.0}}, 3.0),
        ({"approach": "packed", "budget": {"wall_s": 3.0}}, None),
    ],
)
def test_passes_over_the_text_are_counted_as_each_approach_reads_it(run, expected):
    settings = decode(
        RunSettings,
        merge_settings({**RUNS, "budget": {}}, run) if "budget" in run else {**RUNS, **run},
    )
    texts = {
        ("docstrings", "tekken", False): CorpusSize(
            1000, 32_000, {"packed-sequence_length=64": 700}
        )
    }
    (text,) = read_texts(settings, texts)
    assert text.passes == expected


EPOCH = {"budget": {"epochs": 0.1}}
THREE = {"approach": ["padded", "padding-free", "packed"]}
ONE_BASELINE = [{"approach": "padded", "storage.codec": "snappy"}]


@pytest.mark.parametrize(
    ("factors", "repeats", "words", "left_out"),
    [
        ({"micro_batch": [1, 2]}, 5, "one comparison needs at least 6", ()),
        (THREE, 6, "2 comparisons, corrected after Holm, need at least 7", ()),
        ({"approach": ["padded", "packed"], "sequence_length": [32, 64]}, 1, "2 comparisons", ()),
        (
            {"approach": ["padded", "packed"], "layout.data": [1, 2]},
            1,
            "one comparison needs at least 6",
            (),
        ),
        (
            {"approach": ["padded", "packed"], "layout": [{"data": 1}, {"data": 2}]},
            1,
            "one comparison needs",
            (),
        ),
        (
            {"approach": ["padded", "packed"], "layout": [{"data": 2}, {"tensor": 2}]},
            1,
            "2 comparisons",
            (),
        ),
        (
            {"approach": APPROACHES, "storage.codec": ["zstd", "snappy"]},
            1,
            "2 comparisons",
            ONE_BASELINE,
        ),
    ],
)
def test_repeats_that_allow_no_verdict_are_told_with_the_number_it_takes(
    factors, repeats, words, left_out
):
    few, enough = (
        [
            o
            for o in find_problems(design(factors, EPOCH, repeats=n, left_out=left_out))
            if o.key == "repeats"
        ]
        for n in (repeats, 7)
    )
    assert [o.level for o in few] == ["warn"] and words in few[0].what and not enough


def test_only_primary_comparisons_need_repeats():
    first = PrimaryComparison({"approach": "packed"}, {"approach": "padded"})
    second = PrimaryComparison({"approach": "packed"}, {"approach": "padding-free"})

    def told(primary, primary_repeats):
        found = design(THREE, EPOCH, repeats=1)
        experiment = replace(found.experiment, primary=primary, primary_repeats=primary_repeats)
        problems = find_problems(replace(found, experiment=experiment))
        return [p.what for p in problems if p.key == "primary_repeats"]

    assert told((first,), 6) == told((first, second), 7) == told((), None) == []
    assert "one comparison needs at least 6" in told((first,), 5)[0]
    assert "2 comparisons, corrected after Holm, need at least 7" in told((first, second), 6)[0]


FILES = {"kind": "files", "files": ("a.txt",), "validation_files": ("b.txt",)}
STREAM = {
    "kind": "stream",
    "repository": "a/b",
    "revision": "0" * 40,
    "validation_split": "validation",
}


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        (
            {"source": FILES, "cleaning": {"deduplicate": False}},
            "also occur in its training text are trained on",
        ),
        (
            {"source": STREAM, "cleaning": {"deduplicate": False}},
            "also occur in its training text are trained on",
        ),
        (
            {"source": {**FILES, "validation_files": ("a.txt",)}},
            "a.txt is used for training and for validation",
        ),
        ({"validation_share": 0.0}, "holds out no documents"),
        ({"source": FILES}, None),
        ({"source": STREAM}, None),
        ({"cleaning": {"deduplicate": False}}, None),
    ],
)
def test_held_out_text_is_held_out(corpus, words):
    for rows, expected in ((8, words), (0, None)):
        found = said(
            {"approach": APPROACHES},
            runs={"corpus": corpus, "validation": {"rows": rows}},
            level="refuse",
        )
        assert [expected in what for _, what in found] == ([True] if expected is not None else [])


@pytest.mark.parametrize(
    ("target", "rows", "words"),
    [
        (5.5, [0, 8], "1 of 2 cells do not validate"),
        (5.5, [0], "1 of 1 cells"),
        (5.5, [8], None),
        (None, [0], None),
    ],
)
def test_a_target_loss_is_one_of_validation(target, rows, words):
    found = design({"validation.rows": rows})
    problems = find_problems(
        replace(found, experiment=replace(found.experiment, target_loss=target))
    )
    told = [problem.what for problem in problems if problem.level == "refuse"]
    assert len(told) == (words is not None) and all(words in what for what in told)


@pytest.mark.parametrize(
    ("device", "gpus", "cores", "level", "words"),
    [
        ("auto", 1, 8, "refuse", "4 ranks need a GPU each, but this machine has 1"),
        ("auto", 4, 8, None, None),
        ("auto", 0, 8, "warn", "this machine has no GPU"),
        ("cpu", 1, 2, "warn", "4 ranks oversubscribe 2 cores"),
        ("cpu", 0, 8, "note", "share the cores"),
        ("cpu", None, None, None, None),
        ("auto", None, None, None, None),
    ],
)
def test_world_sizes_are_held_against_what_is_here(device, gpus, cores, level, words):
    found = design({"layout.data": [1, 4]}, runs={"device": device}, gpus=gpus, cores=cores)
    found = [(o.level, o.what) for o in find_problems(found)]
    assert (found[0][0], words in found[0][1]) == (level, True) if level else found == []


def describe_confounding(names, cells) -> list[str]:
    """Subject of each refusal, found from all pairs of cells."""
    pairs = [
        (a, b, [name for name in names if a[name] != b[name]])
        for a, b in itertools.combinations(cells, 2)
    ]
    changes = [differing for _, _, differing in pairs]
    alone = {differing[0] for differing in changes if len(differing) == 1}
    subjects = []
    explained = set(alone)
    for name in names:
        with_it = set(names).intersection(*(found for found in changes if name in found))
        others = [other for other in names if other in with_it and other != name]
        if others and name not in explained:
            explained.update(with_it)
            subjects.append(f"factor {name} never changes alone: {listing(others)} changes")
    lonely = []
    for cell in [] if subjects else cells:
        fewest = min((found for a, b, found in pairs if cell in (a, b)), key=len)
        if len(fewest) > 1:
            levels = ", ".join(f"{name}={cell[name]}" for name in names)
            lonely.append(f"cell {levels} differs from every other in {listing(fewest)} at once")
    return lonely or [
        *subjects,
        *(f"no two cells differ in {name} alone" for name in names if name not in explained),
    ]


def test_confounding_is_found_as_by_all_pairs_of_cells():
    chance = random.Random(57)
    kinds = set()
    factors = {"micro_batch": [1, 2], "precision": ["fp32", "bf16"], "sequence_length": [64, 128]}
    factors["seed"] = [0, 1, 2]
    cells = experiments.expand_cells(Experiment("?", factors=factors))
    for _ in range(150):
        kept = chance.sample(cells, chance.randint(2, 7))
        found = design(factors, left_out=[c for c in cells if c not in kept], repeats=1)
        expected = describe_confounding(found.factors, found.cells)
        texts = [problem.what for problem in check_confounding(found)]
        assert [t[: len(of)] for t, of in zip(texts, expected, strict=True)] == expected
        kinds.update(subject.split()[0] for subject in expected)
    assert kinds == {"factor", "cell", "no"}


@pytest.mark.parametrize("check", [check_confounding, check_compound_levels, check_repeated_data])
def test_checks_of_cells_grow_with_their_number(check):
    def count(levels: int) -> int:
        steps = [20 * n for n in range(1, levels + 1)]
        together = [[n, n / 1000] for n in range(1, levels + 1)]
        factors = {"budget.steps": steps, "seed, optimizer.learning_rate": together}
        found = design(factors, repeats=1)
        assert found.readings and found.factors
        return count_operations(lambda: list(check(found)))

    # 256 cells after 64: 4 times as much, 16 times if all pairs were compared
    assert count(16) < 6 * count(8)


@pytest.mark.parametrize(
    ("key", "levels", "refused"),
    [
        ("tokenizer", ["a", "b"], True),
        ("objective", ["causal", "masked"], True),
        ("labels", ["all", "stream"], True),
        ("optimizer.learning_rate", [0.1, 0.2], False),
    ],
)
@pytest.mark.parametrize("quantity", ["validation_loss", "useful_tokens_per_s"])
def test_a_primary_comparison_of_losses_needs_one_unit(key, levels, refused, quantity):
    over, of = levels
    comparison = PrimaryComparison(of={key: of}, over={key: over}, quantity=quantity)
    experiment = Experiment("?", factors={key: levels}, primary=(comparison,), repeats=6)
    found = list(check_loss_units(Design(experiment, [], TEXTS)))
    assert [problem.key for problem in found] == ["primary.0.quantity"] * (
        refused and quantity == "validation_loss"
    )


def test_only_a_comparison_of_losses_states_a_margin():
    levels = {"optimizer.learning_rate": [0.1, 0.2]}
    sides = [{"optimizer.learning_rate": level} for level in (0.1, 0.2)]
    comparison = PrimaryComparison(of=sides[0], over=sides[1], margin=0.01)
    experiment = Experiment("?", factors=levels, primary=(comparison,), repeats=6)
    with pytest.raises(UserError, match="margin of its own") as refused:
        describe_primary(experiment)
    assert "quantity: validation_loss" in str(refused.value)
    stated = replace(comparison, quantity="validation_loss")
    (described,) = describe_primary(replace(experiment, primary=(stated,)))
    assert described["margin"] == 0.01
