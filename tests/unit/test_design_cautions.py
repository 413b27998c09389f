"""What `check` warns of before the runs is a caution of their report: few documents, large batches,
uneven ranks.
"""

from dataclasses import replace

import pytest

from tests import logs
from tests.logs import tabulate
from tokenscale.base.files import read_json, write_json
from tokenscale.referee.design import find_cautions
from tokenscale.referee.readings import read_sizes
from tokenscale.report import summary
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.mixture import MixtureSettings, MixtureSource, MixtureStage
from tokenscale.settings.run import OptimizerSettings, ValidationSettings

LENGTH = 512
PACKED = f"packed-sequence_length={LENGTH}"
HELD_OUT = f"packed-split=validation-sequence_length={LENGTH}"


def manifests(folder, corpus="docs", documents=2, tokens=3 * LENGTH, held_out=1, built=True):
    """(stores, corpora) of a text of so many training tokens; 4 bytes a token. Without `built`,
    only the held-out text has a store.
    """
    stores = []
    splits = {}
    for split, store, n, ids in (
        ("train", PACKED, documents, tokens),
        ("validation", HELD_OUT, held_out, LENGTH),
    ):
        splits[split] = {"rows": n, "utf8_bytes": 4 * ids}
        if built or split == "validation":
            path = folder / "tokens" / corpus / "tekken" / store / "manifest.json"
            counts = dict.fromkeys(("places", "tokens_stored", "tokens_total"), ids) | {
                "tokens_useful": ids - n
            }
            about = {
                "format": "packed",
                "options": {"eos": False},
                "split": split,
                "tokenizer": {"name": "tekken"},
            }
            write_json(
                path,
                about
                | counts
                | {"documents": n, "rows": -(-ids // LENGTH), "vocabulary_size": 512}
                | {"bits_per_token": {"order_0_entropy": 9.5}, "files": []},
            )
            stores.append(path)
    path = folder / "corpus" / corpus / "manifest.json"
    write_json(path, {"splits": splits})
    return stores, [path]


def run(approach="packed", world_size=1, repeat=0, steps=24, **fields):
    fixed = {"corpus": CorpusSettings(name="docs"), "tokenizer": TokenizerSettings(name="tekken")}
    fixed |= {"sequence_length": LENGTH, "validation": ValidationSettings(rows=0)}
    return logs.settings(approach, world_size, repeat, steps, **(fixed | fields))


def cautions(folder, runs, found):
    """What `ingest` keeps of the design of an experiment of these runs."""
    table = read_json(logs.write_table(folder / "runs.json", runs))
    return [caution["what"] for caution in find_cautions(table, *found, {})]


def told(folder, runs, found):
    """The page's description of an experiment of these runs, of which `ingest` made tables."""
    table = logs.write_table(folder / "runs.json", runs)
    tabulate(table, folder / "runs", folder / "tables/demo", stores=found[0], corpora=found[1])
    return summary.experiment("demo", folder / "tables")


def mixture(*names, limit=None):
    sources = tuple(MixtureSource(CorpusSettings(name=name), limit) for name in names)
    return MixtureSettings(
        sources=sources, stages=(MixtureStage(weights=(1 / len(names),) * len(names)),)
    )


BF16 = {"precision": "bf16-true", "optimizer": OptimizerSettings(beta2=0.999)}


@pytest.mark.parametrize(
    ("fields", "text", "words"),
    [
        ({}, {}, "reads its text 64 times"),
        # no store of the training text
        ({"approach": "padded"}, {"built": False}, "reads its text 96 times"),
        # its tokens are estimated
        ({"approach": "padding-free"}, {"built": False}, "reads its text 64 times"),
        ({}, {}, "8 sequences is larger than its text, which has 3 rows"),
        (
            {"global_batch": 256},
            {"documents": 50, "tokens": 200 * LENGTH},
            "256 sequences is larger",
        ),
        ({"validation": ValidationSettings(rows=4)}, {}, "1 document of docs in 1 of the 4 rows"),
        ({"validation": ValidationSettings(rows=1)}, {"held_out": 2}, "2 documents of docs"),
        (
            {"world_size": 3},
            {"tokens": 10**6},
            "3 data-parallel ranks: those with 2 wait for those with 3",
        ),
        (BF16, {"tokens": 10**6}, "second moment in bf16 never decays"),
    ],
)
def test_what_check_warns_of_is_a_caution_of_the_report(tmp_path, fields, text, words):
    found = cautions(tmp_path, [run(**fields)], manifests(tmp_path, **text))
    assert len([caution for caution in found if words in caution]) == 1, found


def test_a_mixture_is_cautioned_about_by_corpus(tmp_path):
    stores, corpora = manifests(tmp_path, "a", tokens=4 * LENGTH)
    more = manifests(tmp_path, "b", tokens=1000 * LENGTH)
    mixed = run(corpus=CorpusSettings(name="mixed"), mixture=mixture("a", "b"))
    (caution,) = [
        c for c in cautions(tmp_path, [mixed], (stores + more[0], corpora + more[1])) if "read" in c
    ]
    assert "a 24 times" in caution and "b" not in caution.split(": ")[1]


def test_enough_text_is_no_caution(tmp_path):
    fields = {"world_size": 2, "validation": ValidationSettings(rows=1)}
    found = manifests(tmp_path, documents=10**4, tokens=10**6, held_out=400)
    assert cautions(tmp_path, [run(**fields)], found) == []


def test_what_nobody_knows_is_not_cautioned_about(tmp_path):
    assert cautions(tmp_path, [run()], ([], [])) == []
    _, corpora = manifests(tmp_path, built=False)
    found = cautions(tmp_path, [run("padded"), run("pretokenized-padded"), run()], ([], corpora))
    assert [
        text for text in found if "runs of 2 of 3 cells" in text.lower()
    ] and "very run" not in " ".join(found)


def test_steps_that_no_budget_states_are_counted_from_the_logs(tmp_path):
    """A budget in tokens: before the runs nobody knows how often the text is read, behind them
    everybody.
    """
    asked = run(steps=12)
    asked = replace(asked, budget=replace(asked.budget, useful_tokens=5000))
    assert not any(
        "reads" in caution for caution in cautions(tmp_path, [asked], manifests(tmp_path))
    )
    logs.write_run(tmp_path / "runs", asked)
    assert any(
        "32 times" in caution
        for caution in told(tmp_path, [asked], manifests(tmp_path))["cautions"]
    )


def test_a_comparison_of_losses_says_how_often_its_text_was_read(tmp_path):
    runs = [
        run(approach, validation=ValidationSettings(rows=16)) for approach in ("padded", "packed")
    ]
    for one in runs:
        logs.write_run(tmp_path / "runs", one)
    part = told(tmp_path, runs, manifests(tmp_path))
    loss, after_seconds = [answer for answer in part["answers"] if answer["part"] == "loss"]
    assert "At equal compute" in loss["text"] and "s of training steps" in after_seconds["text"]
    assert "read 64 to 96 times" in loss["spread"] and "1 document" in loss["spread"]
    assert not [a for a in part["answers"] if a["part"] != "loss" and "times" in a["spread"]]
    assert len([c for c in part["cautions"] if "64 to 96 times" in c]) == 1


def test_sizes_are_those_of_the_manifests(tmp_path):
    stores, corpora = manifests(tmp_path)
    (size,) = read_sizes([run()], stores, corpora).values()
    assert (size.documents, size.tokens, size.rows[PACKED], size.held_out) == (2, 3 * LENGTH, 3, 1)
    stores[0].write_text("{")  # being written: as if it were not there
    (size,) = read_sizes([run()], stores, corpora).values()
    assert (size.documents, size.tokens, PACKED in size.rows) == (2, 3 * LENGTH, False)
    assert read_sizes([run(eos=True)], stores[:1], []) == {}
