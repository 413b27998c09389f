"""Runs that are not like for like are found, and what tells them apart is named."""

import json

import numpy as np
import pandas as pd
import pytest

from tokenscale.referee import comparability
from tokenscale.referee.comparability import refusals, refused, sentences

#: a run as the table `runs` has it
ROW = {
    "validity": "valid",
    "corpus": "web",
    "tokenizer": "tekken",
    "model": "llama-8b",
    "sequence_length": 2048,
    "global_batch": 8,
    "micro_batch": 2,
    "precision": "bf16",
    "steps_asked": 100,
    "world_size": 1,
    "device": "GH200",
    "cpu": "Grace",
    "cores": 72,
    "threads_per_rank": 72,
    "oversubscribed": False,
    "machine": "alps",
    "share": 1,
    "versions": '{"torch":"2.13.0"}',
    "science": "s",
    "code_digest": "c",
}


def table(*runs) -> pd.DataFrame:
    """Rows of (approach, changes); `further` is a factor of the cell beside approach and
    data-parallel degree.
    """
    rows = []
    for number, (approach, changes) in enumerate(runs):
        row = {**ROW, "repeat": 0, **changes, "approach": approach, "run_id": f"run-{number}"}
        further = "".join(f", {key}={row[key]}" for key in row.pop("further", ()))
        row["series"] = f"{approach}{further}"
        row["cell"] = (
            f"approach={approach}, layout.data={row.pop('cell_ranks', row['world_size'])}{further}"
        )
        row["seed"] = row.get("seed", row["repeat"])
        rows.append(row)
    return pd.DataFrame(rows)


SAME = {"tokenizer_sha256": "a" * 64, "environment": '{"OMP_NUM_THREADS":"2"}'}


def test_the_studys_sequence_length_mix_up_is_named_and_its_trend_over_batch_sizes_refused():
    """Four approaches at local batch 1 and 2, one of them at another sequence length (1.8, no.
    1).
    """
    runs = [
        (
            approach,
            {
                "micro_batch": batch,
                "global_batch": batch,
                "science": f"{batch}",
                "further": ("micro_batch",),
            },
        )
        for batch in (1, 2)
        for approach in ("padded", "pretokenized-padded", "padding-free", "token-list")
    ]
    runs[2][1].update(sequence_length=4096, science="other")
    runs = table(*runs)
    (found,) = refusals(runs, "approach")
    assert (
        found.run_ids == ("run-2",)
        and "padding-free at layout.data=1, micro_batch=1" in found.sentence
    )
    (found,) = refusals(
        runs[runs["approach"] == "padding-free"].assign(global_batch=2), "micro_batch"
    )
    assert set(found.run_ids) == {"run-2", "run-6"}
    assert "sequence_length 4096 (micro_batch=1) vs 2048 (micro_batch=2)" in found.sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"share": 2}, "runs at once on its node 2 vs 1"),
        ({"machine": "other"}, "machine other vs alps"),
        ({"device": "A100"}, "device A100 vs GH200"),
        ({"oversubscribed": True}, "oversubscribed True vs False"),
        ({"versions": '{"torch":"2.12.0"}'}, "torch 2.12.0 vs 2.13.0"),
        ({"environment": '{"OMP_NUM_THREADS":"1"}'}, "environment variable OMP_NUM_THREADS 1 vs 2"),
        (
            {"environment": '{"MALLOC_ARENA_MAX":"1","OMP_NUM_THREADS":"2"}'},
            "MALLOC_ARENA_MAX 1 vs not set",
        ),
        ({"environment": '{"NCCL_ALGO":"Ring"}'}, "OMP_NUM_THREADS not set vs 2"),
        ({"environment": "{}"}, "OMP_NUM_THREADS not set vs 2"),
        ({"model": "llama-1b"}, "model llama-1b vs llama-8b"),
        ({"steps_asked": 200, "science": "t"}, "positions trained on 3,276,800 vs 1,638,400"),
        ({"seed": 5, "science": "t"}, "seed 5 vs 0"),
        ({"tokenizer_sha256": "b" * 64}, "content of the tokenizer bbbbbbbbbbbb vs aaaaaaaaaaaa"),
    ],
)
def test_what_tells_a_run_apart_is_named(change, words):
    runs = table(("padded", SAME), ("packed", SAME), ("token-list", SAME | change))
    (found,) = refusals(runs, "approach")
    assert found.run_ids == ("run-2",)
    assert words in found.sentence
    for index in ([0, 0, 1], [0, 1, 1]):  # rows that were put together from several tables
        assert refused(refusals(runs.set_axis(index), "approach")) == {"run-2"}


def ranks(number, **variables):
    return ("packed", {"world_size": number, "environment": json.dumps(variables)})


def on_nodes(number, share, nodes="a"):
    return ("packed", {"world_size": number, "share": share, "node_names": nodes})


def repeats(approach, count, **changes):
    return [(approach, {"repeat": k, "science": f"{k}"} | changes) for k in range(count)]


def worlds(batches, **changes):
    return [
        (
            "packed",
            {"world_size": n, "global_batch": batch, "science": f"{n}", "cores": n} | changes,
        )
        for n, batch in batches.items()
    ]


def layouts(**last):
    of = [
        {"world_size": n, "cores": n, "layout.tensor": t, "further": ("layout.tensor",)}
        for n, t in SIZES
    ]
    return [("packed", fields | (last if fields is of[-1] else {})) for fields in of]


SIZES = ((1, 1), (2, 2), (4, 2))
OURS = [("padded", {"external": False}), ("packed", {"external": False})]
THEIRS = {
    "external": True,
    "science": "external-1",
    "code_digest": None,
    "versions": '{"torch":"2.9.0"}',
    "seed": 7,
}
LENGTHS = [
    ("packed", {"sequence_length": n, "science": f"{n}", "further": ("sequence_length",)})
    for n in (512, 1024)
]
#: what is alike: factors, runs
ALIKE = {
    "the factor alone": (
        "approach world_size",
        [
            ("padded", {}),
            ("packed", {"store_sha256": "x"}),
            ("packed", {"code_digest": "d", "world_size": 2}),
        ],
    ),
    "fewer threads of more ranks": (
        "world_size",
        [ranks(1, OMP_NUM_THREADS="2"), ranks(2, OMP_NUM_THREADS="1")],
    ),
    "an environment that is not recorded": (
        "approach",
        [("padded", ranks(1, OMP_NUM_THREADS="2")[1]), ("packed", {})],
    ),
    "variables of communication, which one rank has not": (
        "world_size",
        [ranks(1), ranks(2, NCCL_ALGO="Ring"), ranks(4, NCCL_ALGO="Ring")],
    ),
    "world sizes on nodes that are as busy": (
        "world_size",
        [on_nodes(1, share=4), on_nodes(2, share=2), on_nodes(4, share=1), on_nodes(8, 1, "a, b")],
    ),
    "another release with the same code": (
        "approach",
        [
            (a, {"versions": f'{{"torch":"2.13.0","tokenscale":"{v}"}}'})
            for a, v in (("padded", 1), ("packed", 2))
        ],
    ),
    "seeds of repeats": ("approach", repeats("padded", 3) + repeats("packed", 3)),
    "what is not recorded": (
        "approach",
        [("padded", {"machine": None, "share": None, "versions": None}), ("packed", {})],
    ),
    "invalid runs": ("approach", [("padded", {}), ("packed", {"share": 3, "validity": "invalid"})]),
    "weak scaling": ("world_size", worlds({1: 8, 2: 16, 4: 32})),
    "a budget in tokens": (
        "approach",
        [("padded", {"steps_asked": 300}), ("packed", {"steps_asked": 120})],
    ),
    "another program's run beside a budget in tokens": (
        "approach",
        [
            ("padded", {"external": False, "steps_asked": 300}),
            ("packed", {"external": False, "steps_asked": 120}),
            ("mine", {**THEIRS, "steps_asked": 300}),
        ],
    ),
    "lengths of a sequence at equal tokens": (
        "sequence_length",
        [(a, f | {"steps_asked": n}) for (a, f), n in zip(LENGTHS, (200, 100), strict=True)],
    ),
    "layouts": ("layout", layouts()),
    "another program's run": (
        "approach world_size layout",
        [*OURS, ("packed", {**THEIRS, "cores": None})],
    ),
    "another program's scaling": (
        "world_size layout",
        [OURS[1], ("packed", {**THEIRS, "sequence_length": 512})],
    ),
}
#: what is not: factor, runs, the numbers of the runs that are refused, words
UNLIKE = {
    "a variable that one of two ranks sets": (
        "world_size",
        [ranks(1, OMP_NUM_THREADS="2"), ranks(2, MALLOC_ARENA_MAX="1")],
        {0, 1},
        "MALLOC_ARENA_MAX",
    ),
    "variables of communication": (
        "world_size",
        [ranks(1), ranks(2, NCCL_ALGO="Ring"), ranks(4, FI_PROVIDER="cxi")],
        None,
        "FI_PROVIDER",
    ),
    "settings without a column": (
        "approach",
        [("padded", {}), ("packed", {"science": "t"})],
        {0, 1},
        "does not name",
    ),
    "repeats of other code": (
        "approach",
        [("padded", {}), ("packed", {}), ("packed", {"repeat": 1, "code_digest": "d"})],
        {1, 2},
        "different code or inputs",
    ),
    "two parts of one size": (
        "approach",
        [
            ("padded", {}),
            ("packed", {}),
            ("padding-free", {"share": 2}),
            ("token-list", {"share": 2}),
        ],
        {0, 1, 2, 3},
        "runs at once on its node 1 (padded, packed) vs 2 (padding-free, token-list)",
    ),
    "one repeat that shared its node": (
        "approach",
        [*repeats("padded", 3), ("packed", {"share": 4}), *repeats("packed", 3)[1:]],
        {3},
        "4 vs 1",
    ),
    "one repeat of a single cell": (
        "approach",
        [*repeats("packed", 2), *repeats("packed", 3, share=2)[2:]],
        {2},
        "2 vs 1",
    ),
    "world sizes of which one had company": (
        "world_size",
        [on_nodes(1, share=4), on_nodes(2, share=1)],
        {0, 1},
        "runs at once on its node 4 (layout.data=1) vs 1 (layout.data=2)",
    ),
    "a device that is not recorded is as most": (
        "approach",
        [
            ("padded", {}),
            ("packed", {}),
            ("token-list", {"device": None}),
            ("padding-free", {"device": "A100"}),
        ],
        {3},
        "A100",
    ),
    "more repeats are not the measure": (
        "approach",
        repeats("padded", 3) + repeats("packed", 2, share=2),
        {0, 1, 2, 3, 4},
        "2 (packed)",
    ),
    "a batch that grows otherwise": (
        "world_size",
        worlds({1: 8, 2: 16, 4: 20}),
        None,
        "global_batch",
    ),
    "lengths of a sequence at equal steps": (
        "sequence_length",
        LENGTHS,
        {0, 1},
        "positions trained on 409,600 (sequence_length=512) vs 819,200 (sequence_length=1024)",
    ),
    "settings of layouts": ("layout", layouts(science="t"), None, "does not name"),
    "another program's budget, ours being equal": (
        "approach",
        [*OURS, ("mine", {**THEIRS, "steps_asked": 300})],
        {2},
        "positions",
    ),
    "another program's length": (
        "approach",
        [*OURS, ("packed", {**THEIRS, "sequence_length": 512})],
        {2},
        "sequence_length 512 vs 2048",
    ),
    "another program's world size": (
        "approach",
        [*OURS, ("packed", {**THEIRS, "world_size": 4, "cell_ranks": 1})],
        {2},
        "world size 4 vs 1",
    ),
    "another program's length beside one run": (
        "approach",
        [OURS[1], ("packed", {**THEIRS, "sequence_length": 512})],
        {0, 1},
        "packed (external)",
    ),
}


@pytest.mark.parametrize(("factors", "runs"), ALIKE.values(), ids=ALIKE)
def test_what_is_alike_is_compared(factors, runs):
    for factor in factors.split():
        found = refusals(table(*runs), factor)
        assert found == [] and sentences(found) == "" and refused(found) == set()


@pytest.mark.parametrize(("factor", "runs", "which", "words"), UNLIKE.values(), ids=UNLIKE)
def test_what_is_not_alike_is_refused(factor, runs, which, words):
    found = refusals(table(*runs), factor)
    assert words in sentences(found)
    assert which is None or refused(found) == {f"run-{n}" for n in which}


def test_what_most_state_is_counted_once():
    random = np.random.default_rng(0)
    for _ in range(50):
        stated = random.integers(0, 4, (random.integers(1, 12), 3)).tolist()
        facts = {
            i: {name: v for name, v in zip("abc", values, strict=True) if v}
            for i, values in enumerate(stated)
        }
        columns = {name: [f[name] for f in facts.values() if name in f] for name in "abc"}
        most = {name: max(v, key=v.count) for name, v in columns.items() if len(set(v)) > 1}
        expected = {i: {name: f.get(name, most[name]) for name in most} for i, f in facts.items()}
        found = comparability._filled(facts)
        assert {i: dict(pairs) for i, pairs in found.items()} == expected


def test_equal_rows_are_judged_once_for_each_factor(monkeypatch):
    judged = []
    of_group = comparability._of_group
    monkeypatch.setattr(comparability, "_found", {})
    monkeypatch.setattr(
        comparability,
        "_of_group",
        lambda *a, **of: judged.append(of["factor"]) or of_group(*a, **of),
    )
    runs = table(("padded", SAME), ("packed", SAME), ("token-list", SAME | {"share": 2}))
    found = refusals(runs, "approach")
    assert found and refusals(runs.copy().set_index("run_id", drop=False), "approach") == found
    assert judged == ["approach"]
    found.clear()
    assert refusals(runs, "approach") and refusals(runs, "micro_batch") == []
    assert set(judged[1:]) == {"micro_batch"}
    assert refusals(runs.assign(share=2), "approach") == []
