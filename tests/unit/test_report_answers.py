"""Answers of the first screen, short captions, figures with nothing to show, and pages as narrow as
a phone.
"""

import math
import re
import statistics
import subprocess
import sys
from importlib import resources
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests import logs
from tokenscale.report import answers, captions, save, summary
from tokenscale.report.style import number
from tokenscale.report.summary import describe_text


def padding(**shares):
    rows = [
        {
            "run_id": f"{name}-{i}",
            "approach": name,
            "series": name,
            "world_size": world,
            "repeat": i,
        }
        | {"not_useful_share": of + i / 50}
        for name, share in shares.items()
        for world, of in ((1, share), (2, 0.9))
        for i in range(2)
    ]
    return pd.DataFrame(rows)


def test_padding_is_counted_by_approach_at_the_fewest_ranks():
    rows = padding(padded=0.6, packed=0.01)
    (answer,) = answers.answer_padding(rows)
    assert "61 % with padded and 2 % with packed" in answer["text"]
    assert answer["spread"] == "exact counts of 4 runs; repeats differ by up to 2 points"
    assert answer["verdict"] == answers.COUNTED
    assert answers.answer_padding(padding(padded=0.6)) == [], "one approach is no comparison"


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ({"docstrings": 0.75}, "75 %"),
        *((wrong, "not known") for wrong in ({"another": 0.75}, "75 %")),
    ],
)
def test_what_runs_count_reaches_answers_and_tables_and_is_never_taken_for_nothing(
    tmp_path, recorded, said
):
    runs = [logs.settings(approach) for approach in ("padded", "packed")]
    assert runs[0].corpus.name == "docstrings"
    logs.write_run(tmp_path / "runs", runs[0], text_cut=recorded)
    logs.write_run(tmp_path / "runs", runs[1])
    logs.ingested(tmp_path, runs, to="tables/demo")
    found = summary.experiment("demo", tmp_path / "tables")
    texts = {answer["part"]: answer["text"] for answer in found["answers"]}
    assert texts["dropped text"] == f"Text dropped: {said} with padded; packed keeps all"
    assert texts["choice"].startswith("Use packed: it drops no text")
    assert said in found["cautions"][0]
    for table in (found["throughput"], found["validation"]):
        assert [table.columns[-1][0], *(row[-1] for row in table.rows)] == [
            "text dropped",
            said,
            "0 %",
        ]
    assert any(
        said in answer["spread"] for answer in found["answers"] if answer["part"] == "throughput"
    )


NAN = float("nan")


def text(shares, counted_by_run=False):
    """Rows of `dropped_text.sql`: series → share, or corpus → share."""
    rows = [
        {"series": name, "corpus": corpus, "dropped_share": share, "counted_by_run": counted_by_run}
        for name, of in shares.items()
        for corpus, share in (of if isinstance(of, dict) else {"web": of}).items()
    ]
    return pd.DataFrame(rows, columns=["series", "corpus", "dropped_share", "counted_by_run"])


@pytest.mark.parametrize(
    ("shares", "said", "verdict", "cautioned"),
    [
        (
            {"padded": 0.752, "length-bucketed": 0.12, "packed": 0.0, "padding-free": 0.0},
            "75 % with padded, 12 % with length-bucketed; padding-free and packed keep all",
            answers.COUNTED,
            ["75 %", "12 %"],
        ),
        (
            {
                "padded": {"web": 0.5, "books": 0.9, "code": 0.0},
                "packed": {"web": 0.0, "books": 0.0, "code": 0.0},
            },
            "50 % of web, 90 % of books, 0 % of code with padded; packed keeps all",
            answers.COUNTED,
            ["90 % of books"],
        ),
        (
            {"padded": NAN, "packed": 0.0},
            "not known with padded; packed keeps all",
            answers.OPEN,
            ["not known"],
        ),
        (
            {"padded": {"web": 0.5, "books": NAN}, "packed": 0.0},
            "not known of books",
            answers.OPEN,
            ["not known of"],
        ),
        ({"padded": 0.004, "packed": 0.0}, "0.4 % with padded", answers.COUNTED, []),
        ({"padded": 0.752, "pretokenized-padded": 0.752}, "", "", ["75 %"]),
        ({"packed": 0.0, "token-list": 0.0}, "", "", []),
        ({}, "", "", []),
    ],
)
def test_text_that_an_approach_drops_is_answered_and_cautioned(shares, said, verdict, cautioned):
    rows = text(shares)
    found = answers.answer_dropped(rows)
    cautions = answers.caution_dropped(answers.dropped_shares(rows))
    assert [answer["verdict"] for answer in found] == ([verdict] if said else [])
    assert all(said in answer["text"] for answer in found)
    assert bool(cautions) == bool(cautioned) and all(
        words in " ".join(cautions) for words in cautioned
    )
    assert ("Text is dropped" in " ".join(cautions)) == any("%" in words for words in cautioned)


@given(
    st.dictionaries(
        st.sampled_from(["padded", "padding-free", "token-list", "packed", "length-bucketed"]),
        st.tuples(
            st.sampled_from([0.0, 0.004, 0.4, NAN]),
            st.lists(st.floats(1e3, 1e5), min_size=1, max_size=8),
        ),
        min_size=2,
    )
)
def test_what_to_use_is_the_fastest_that_keeps_the_text_and_what_repeats_do_not_tell_from_it(made):
    rates = [
        {"series": name, "approach": name, "world_size": world, "repeat": repeat}
        | {answers.RATE: rate * world}
        for name, (_, values) in made.items()
        for world in (1, 2)
        for repeat, rate in enumerate(values)
    ]
    throughput = pd.DataFrame(rates)
    shares = text({name: share for name, (share, _) in made.items()})
    found = answers.answer_choice(throughput, shares)
    keeping = {name: values for name, (share, values) in made.items() if share < 0.01}
    assert bool(found) == bool(keeping)
    if not keeping:
        return
    (answer,) = found
    used = re.split(", | or ", re.search("^Use ([^:]*):", answer["text"])[1])
    medians = {name: statistics.median(values) for name, values in keeping.items()}
    fastest = max(medians, key=medians.get)
    assert fastest in used and set(used) <= keeping.keys()
    for name, values in keeping.items():
        pairs = [one / other for one, other in zip(values, keeping[fastest], strict=False)]
        if len(pairs) > 1 and max(pairs) < 0.98:
            assert name not in used, "slower in every pair"
        if len(pairs) > 1 and statistics.median(pairs) >= 1:
            assert name in used, "not slower in half of the pairs"
        if len(pairs) == 1:
            near = medians[name] / medians[fastest]
            assert (name in used) == (near >= 0.9) or abs(near - 0.9) < 1e-9
    assert ("drops no text" in answer["text"]) == (max(made[name][0] for name in used) == 0)
    varied = throughput.assign(series=throughput["series"] + ", tied")
    named = shares.assign(series=shares["series"] + ", tied")
    assert answers.answer_choice(varied, named) == [], "more than the approach differs"


@given(
    rates=st.lists(st.tuples(st.floats(0.98, 1.02), st.floats(0.88, 0.92)), min_size=2, max_size=8),
    third=st.lists(st.floats(0.68, 0.72), min_size=8, max_size=8),
    outlier=st.floats(1e-3, 0.6),
    at=st.integers(0, 7),
)
def test_one_slow_run_lets_no_slower_approach_into_the_choice(rates, third, outlier, at):
    """A run that the machine slowed, of whichever approach but the fastest, widened the range of
    all: approaches 10 and 30 % slower in every pair were then as good.
    """
    made = {
        "packed": [one for one, _ in rates],
        "token-list": [other for _, other in rates],
        "padding-free": third[: len(rates)],
    }
    for slowed in (None, "token-list", "padding-free"):
        rows = [
            {"series": name, "approach": name, "world_size": 1, "repeat": repeat}
            | {answers.RATE: 1e4 * rate * (outlier if name == slowed and repeat == at else 1)}
            for name, values in made.items()
            for repeat, rate in enumerate(values)
        ]
        (answer,) = answers.answer_choice(pd.DataFrame(rows), text(dict.fromkeys(made, 0.0)))
        assert answer["text"].startswith("Use packed: it drops no text"), (slowed, answer)
        kind = "95 % interval" if len(rates) >= 6 else "range"
        assert "speed over that of packed: " in answer["spread"]
        assert f"{kind} of {len(rates)} pairs" in answer["spread"]


@settings(max_examples=30)
@given(
    made=st.dictionaries(
        st.sampled_from(["padding-free", "token-list", "packed", "length-bucketed"]),
        st.tuples(st.floats(1e3, 1e5), st.sampled_from([4.0, 4.001, 4.5, 6.0])),
        min_size=2,
    ),
    repeats=st.integers(1, 7),
    noise=st.sampled_from([0.0, 0.01, 1.0]),
    unknown=st.booleans(),
)
def test_what_to_use_is_no_faster_approach_that_pairs_show_to_end_at_a_higher_loss(
    made, repeats, noise, unknown
):
    """Losses fall as a line, so that interpolation is exact where all take as long; `noise` gives
    the lower loss to another approach in every second repeat.
    """
    rates = pd.DataFrame(
        {"series": name, "approach": name, "world_size": 1, "repeat": repeat, answers.RATE: rate}
        for name, (rate, _) in made.items()
        for repeat in range(repeats)
    )
    order = {name: index % 2 for index, name in enumerate(made)}
    losses = pd.DataFrame(
        {"run_id": f"{name}-{repeat}", "series": name, "repeat": repeat, "step": step}
        | {"world_size": 1, "training_s": float(step), "last": step == 8}
        | {"loss": end + (8 - step) + noise * (repeat % 2 == order[name])}
        for name, (_, end) in made.items()
        for repeat in range(repeats)
        for step in (0, 8)
    )
    if unknown:
        losses = losses[losses["series"] != next(iter(made))]
    (answer,) = answers.answer_choice(rates, text(dict.fromkeys(made, 0.0)), losses, "nats")
    used = re.split(", | or ", re.search("^Use ([^:]*):", answer["text"])[1])
    (plain,) = answers.answer_choice(rates, text(dict.fromkeys(made, 0.0)))
    if unknown or repeats == 1:
        assert answer == plain, "nothing is known of losses, or of their spread"
        return
    ends = losses[losses["step"] == 8].pivot(index="repeat", columns="series", values="loss")
    lowest = ends.median().idxmin()
    if repeats < 6:
        worse = {name for name in made if (ends[name] - ends[lowest]).min() > 1}
        assert not worse & set(used)
    if len({end for _, end in made.values()}) == 1 and not noise:
        assert answer == plain, "losses are equal"
    left = {name: rate for name, (rate, _) in made.items() if name in used}
    for name, (rate, _) in made.items():
        if rate > max(left.values()):
            assert f"{name} trains on" in answer["text"] and "but ends at" in answer["text"]


def test_a_share_that_one_run_lacks_is_not_known_and_what_a_run_counts_is_no_count_of_an_epoch():
    rows = pd.concat([text({"padded": 0.5}, counted_by_run=True), text({"packed": 0.0})])
    for counted, word in ((rows, "by the runs"), (rows.assign(counted_by_run=False), "epoch")):
        assert word in answers.answer_dropped(counted)[0]["spread"]
    (answer,) = answers.answer_dropped(pd.concat([rows, text({"padded": NAN})]))
    assert "not known with padded" in answer["text"] and "50 %" not in answer["text"]


@pytest.mark.parametrize(
    ("of", "over", "noted"),
    [
        (0.75, 0.0, "75 % with padded"),
        (NAN, 0.0, "not known with padded"),
        ({"web": 0.0, "books": 0.5}, {"web": 0.0, "books": 0.0}, "50 % of books with padded"),
        (0.5, 0.495, ""),
    ],
)
def test_losses_of_unequal_text_say_so(of, over, noted):
    rows = validation(
        {"padded": (LINE, [0], 0.0), "packed": ((9, 8, 7, 6), [0], 0.0)},
        {"padded": 10, "packed": 10},
    )
    answer = answer_loss(
        rows, dropped=answers.dropped_shares(text({"padded": of, "packed": over}))
    )[0]
    assert noted in answer["spread"] and answer["verdict"].endswith(answers.UNEQUAL_TEXT) == bool(
        noted
    )


def validation(curves, tokens_per_step, **seconds_per_step):
    rows = [
        {
            "run_id": f"{name}-{i}",
            "series": name,
            "world_size": 1,
            "repeat": i,
            "step": step,
            "last": step == 24,
        }
        | {"useful_tokens_seen": step * tokens_per_step[name], "loss": loss + i * noise}
        | {"positions_seen": step * 32, "training_s": step * seconds_per_step.get(name, 1.0)}
        for name, (losses, repeats, noise) in curves.items()
        for i in repeats
        for step, loss in zip((0, 8, 16, 24), losses, strict=True)
    ]
    return pd.DataFrame(rows)


def answer_loss(rows, *invalid, dropped=None):
    """The answer of these runs and of invalid ones."""
    runs = rows[["run_id", "world_size"]].drop_duplicates().assign(validity="valid", reasons="")
    more = pd.DataFrame(
        {"run_id": invalid, "world_size": 1, "validity": "invalid", "reasons": "no seal; more"}
    )
    return answers.answer_loss(rows, pd.concat([runs, more]), {}, dropped or {})


LINE = (8.0, 7.0, 6.0, 5.0)


@pytest.mark.parametrize(
    ("losses", "repeats", "noise", "verdict", "said"),
    [
        (LINE, 3, 0.01, "beyond the spread of repeats", "1.5 nats apart"),
        ((8.0, 8.0, 8.0, 8.0), 3, 0.01, "beyond the spread of repeats", "3 nats apart"),
        ((8.0, 5.0, 2.0, 2.0), 3, 1.0, "within the spread of repeats", "1.5 nats apart"),
        ((8.0, 8.0, 3.0, 3.0), 3, 0.01, "not resolved", "0.5 nats apart"),
        (LINE, 1, 0.0, "one run each", "1.5 nats apart"),
    ],
)
def test_losses_are_compared_after_equal_seconds(losses, repeats, noise, verdict, said):
    """A step of `padded` takes twice as long, so it ends (at 5.0) where the other is at step 24 and
    it is at step 12 itself.
    """
    curves = {"packed": (LINE, range(repeats), noise), "padded": (losses, range(repeats), noise)}
    rows = validation(curves, {"padded": 10, "packed": 10}, padded=2.0)
    answer = answer_loss(rows)[1]
    assert answer["text"].startswith("After 24 s of training steps") and said in answer["text"]
    assert answer["verdict"] == f"{verdict}, unequal updates", answer
    assert "(step 24)" in answer["text"] and "(step 12)" in answer["text"]
    assert re.search("after (24 against 12|12 against 24) updates", answer["spread"])


def test_losses_are_compared_at_equal_compute_whatever_share_of_it_is_useful():
    """At equal useful tokens `padded` would be at 5.0 where `packed` is at 6.5: the reverse."""
    curves = {"padded": (LINE, range(3), 0.01), "packed": ((8.0, 6.5, 5.5, 4.5), range(3), 0.01)}
    rows = validation(curves, {"padded": 10, "packed": 20})
    answer = answer_loss(rows)[0]
    assert answer["text"].startswith("At equal compute (768 positions)")
    assert (
        "0.5 nats apart: 4.51 with packed (step 24), 5.01 with padded (step 24)" in answer["text"]
    )
    assert answer["verdict"] == "beyond the spread of repeats"
    assert "5.01 with padded and 6.01 with packed" in answers.describe_equal_tokens(rows)


@pytest.mark.parametrize(("repeats", "middle"), [([0], 1.0), ([0, 2], 2.0), ([0, 1, 2], 2.0)])
def test_losses_are_medians_of_all_runs(repeats, middle):
    curves = {"padded": (LINE, [0, 1, 2], 1.0), "packed": ((8.0, 7.0, 6.0, 1.0), repeats, 1.0)}
    answer = answer_loss(validation(curves, {"padded": 10, "packed": 10}), "packed-9")[0]
    assert f"{number(middle, 4)} with packed" in answer["text"]
    assert "6 with padded" in answer["text"]
    assert f"medians of {len(repeats)} and 3 runs" in answer["spread"]
    assert "packed-9 (invalid: no seal)" in answer["spread"]


def test_losses_over_unlike_vocabularies_are_compared_in_bits_per_byte():
    """A token of the larger vocabulary is longer text, so that nats a token say the reverse."""
    curves = {"1024": (LINE, range(3), 0.01), "16384": ((9.0, 8.0, 7.0, 6.0), range(3), 0.01)}
    rows = validation(curves, {"1024": 10, "16384": 10})
    bytes_a_token = rows["series"].map({"1024": 2.0, "16384": 4.0})
    rows["bits_per_byte"] = rows["loss"] / math.log(2) / bytes_a_token
    runs = rows[["run_id", "world_size"]].drop_duplicates()
    runs["tokenizer"] = runs["run_id"].str.split("-").str[0]
    runs["validity"] = "valid"
    runs["reasons"] = ""
    answer = answers.answer_loss(rows, runs, {}, {})[0]
    assert "bits per byte apart: 2.168 with 16384" in answer["text"]
    rows["bits_per_byte"] = math.nan
    assert answers.answer_loss(rows, runs, {}, {}) == []


def test_equal_losses_and_single_series():
    curves = dict.fromkeys(("padded", "packed"), (LINE, [0], 0.0))
    equal = validation(curves, {"padded": 10, "packed": 10})
    assert "are equal: 5 nats" in answer_loss(equal)[0]["text"]
    assert answer_loss(equal)[0]["verdict"] == "one run each"
    assert answer_loss(equal[:0]) == [] == answer_loss(equal[equal["series"] == "padded"])
    assert answers.describe_equal_tokens(equal[:0]) == ""


def order(largest=1e-6, kind="world sizes"):
    pair = {
        "kind": kind,
        "world_size": 1,
        "other_world_size": 2,
        "largest_loss_difference": largest,
    }
    return pd.DataFrame([pair, pair | {"largest_loss_difference": 0.0}])


@pytest.mark.parametrize(
    ("state", "largest", "verdict", "said"),
    [
        (
            "proven",
            1e-6,
            "proven",
            "same data as 1: equal samples and useful tokens at every step, losses within "
            "rounding (1e-6 nats)",
        ),
        ("proven", 0.0, "proven", "bit-identical losses"),
        ("broken", 7.2, "not proven", "1 of 2 pairs have other losses"),
    ],
)
def test_equal_data_is_answered_by_the_proof(state, largest, verdict, said):
    proof = {
        "parts": [
            {"kind": "world sizes", "state": state, "text": "1 of 2 pairs have other losses."}
        ]
    }
    (answer,) = answers.answer_data(order(largest), proof)
    assert answer["verdict"] == verdict and said in answer["text"]
    assert answers.answer_data(order(largest, "online and offline"), proof) == []


def test_scaling_is_one_sentence_over_all_series():
    rows = pd.DataFrame(
        {"series": s, "world_size": w, "base_world_size": 1, "repeat": 0, "efficiency": e / w}
        for s, e in (("padded", 3.0), ("packed", 3.6))
        for w in (1, 2, 4)
    )
    (answer,) = answers.answer_scaling(rows)
    assert (
        answer["text"]
        == "4 ranks reach 75 % with padded to 90 % with packed of ideal scaling from 1"
    )
    assert answers.answer_scaling(rows[rows["world_size"] == 1]) == []


def test_memory_is_compared_at_the_most_ranks_that_have_several_methods():
    cells = [
        ("single", 1, 112e6),
        ("ddp", 2, 112e6),
        ("tp", 2, 57e6),
        ("tp", 2, 59e6),
        ("tp", 4, 30e6),
    ]
    rows = pd.DataFrame(cells, columns=["method", "world_size", "memory_bytes"]).assign(
        factors="", repeat=0
    )
    (answer,) = answers.answer_memory(rows)
    assert answer["text"] == "The fullest of 2 ranks holds 58 MB with tp to 112 MB with ddp"
    assert (
        answer["spread"] == "3 runs, in their first step; 112 MB on one rank"
        and answer["part"] == "memory"
    )
    assert answers.answer_memory(rows[rows["method"] == "tp"]) == [], "one method is no comparison"
    assert answers.answer_memory(rows.assign(memory_bytes=float("nan"))) == [], (
        "nothing was measured"
    )
    assert answers.answer_memory(rows.assign(factors=list("aabbb"))) == [], (
        "another factor changes memory, too"
    )


def test_waiting_is_compared_at_the_most_micro_batches_that_have_several_schedules():
    cells = [("naive", 8, 0.5), ("naive", 8, 0.52), ("1f1b", 8, 0.15)]
    cells += [("naive", 2, 0.5), ("1f1b", 2, 0.4), ("1f1b", 16, 0.1)]
    rows = pd.DataFrame(cells, columns=["schedule", "micro_batches", "bubble_share"])
    rows = rows.assign(pipeline=2, stages_per_rank=1, repeat=0)
    (answer,) = answers.answer_waiting(rows)
    assert (
        "8 micro-batches" in answer["text"]
        and "51 % with naive and 15 % with 1f1b" in answer["text"]
    )
    assert answer["spread"] == "3 runs, up to 2 of a schedule; predicted: 50 %, 11.1 %"
    assert answers.answer_waiting(rows[rows["schedule"] == "1f1b"]) == []


@pytest.mark.parametrize("count", [1, 3, 30])
def test_a_caption_is_short_and_nothing_of_it_is_lost(count):
    text = " ".join(
        f"Sentence {n} of a caption (Chowdhery et al. 2022) has N0 = 1.5 points."
        for n in range(count)
    )
    caption, method = captions.split_caption(text)
    assert f"{caption} {method}".strip() == text
    assert caption.endswith("points.") and len(caption) <= captions.SHORT


def test_no_rule_of_the_style_sheet_is_wider_than_a_phone():
    """390 px less the page's margins. What is wider is inside a box that scrolls."""
    css = resources.files("tokenscale.report").joinpath("page.css").read_text(encoding="utf-8")
    css = re.sub(r"@media \(min-width: 64rem\) \{.*?\n\}", "", css, flags=re.DOTALL)
    for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", css):
        assert not re.search(r"(?<![-\w])(min-)?width: max-content", body), selector
        widths = re.findall(r"(?<!max-)(?<![-\w])(?:min-)?width: ([\d.]+)rem", body)
        wide = [width for width in widths if 16 * float(width) > 390 - 64]
        assert not wide or selector.strip() == ".drawing svg", selector


def begun(*designs):
    return pd.DataFrame({"external": False, "status": "complete", "design_sha256": designs})


@pytest.mark.parametrize(
    ("runs", "words", "caution"),
    [
        (begun("a", "a"), "were set before the first of these runs.", ""),
        (begun("a", None), "not recorded of 1 of 2 runs", ""),
        (begun(None, None), "is not recorded", ""),
        (begun("b", "b", "a"), "changed after 2 of 3 runs had begun", "changed after 2 of 3"),
        (begun("a").assign(status="missing"), "is not recorded", ""),
    ],
)
def test_a_design_that_was_changed_after_runs_had_begun_is_named(runs, words, caution):
    assert words in answers.describe_registration(runs, "a")
    assert caution in answers._caution_design(runs, "a")
    assert bool(caution) == bool(answers._caution_design(runs, "a"))


def test_the_page_shows_the_card_of_the_text():
    """Lengths where a store of lengths is among the tables; nothing where no store is at hand."""
    store = {
        "corpus": "web",
        "tokenizer": "bpe",
        "split": "train",
        "documents": 100,
        "document_tokens": 3200,
        "text_bytes": 16_000,
        "sequence_length": 256,
        "dropped": '{"duplicates":24,"empty or short":0}',
        "median_tokens": None,
        "tokens_95": None,
        "largest_tokens": None,
    }
    lengths = {"median_tokens": 20.0, "tokens_95": 90.0, "largest_tokens": 700.0}
    stores = pd.DataFrame([store, store | lengths | {"sequence_length": None}])
    runs = pd.DataFrame({"approach": ["packed", "padded"], "document_mask": [False, False]})
    assert describe_text("web", "bpe", stores, runs) == (
        "corpus web, tokenizer bpe (100 documents; dropped: 24 duplicates; a document: 20 tokens in "
        "the median, 95 % at most 90, the largest 700; 0.200 tokens a byte; a packed row of 256 "
        "holds about 8.0 documents, which see each other (document_mask: false))"
    )
    masked = runs.assign(document_mask=True)
    assert "which do not see each other" in describe_text("web", "bpe", stores, masked)
    assert "each other" not in describe_text("web", "bpe", stores, runs[1:])
    assert "in the median" not in describe_text("web", "bpe", stores[:1], runs)
    assert describe_text("books", "bpe", stores, runs) == "corpus books, tokenizer bpe"


@settings(max_examples=6, deadline=None)
@given(
    words=st.tuples(st.integers(1, 18), st.integers(1, 60)),
    size=st.tuples(st.floats(3, 9), st.floats(2, 12)),
)
def test_a_slide_is_16_to_9_and_its_drawing_lies_between_title_and_caption(words, size):
    title, caption = ("word " * count for count in words)
    texts = {"title": title, "queries": ("throughput",)} | {
        name: lambda text=text: text
        for name, text in {"finding": title, "caption": caption, "folded": "", "alt": ""}.items()
    }
    shown = SimpleNamespace(**texts, table=lambda: None)
    loaded = save.LoadedFigure(name="rates", figure=shown, data=pd.DataFrame(), csv="a\n1\n")
    slide = save.make_slide(loaded, Figure(figsize=size))
    pixels = slide.get_size_inches() * slide.dpi
    assert tuple(pixels.round()) == (1920, 1080)
    (image,) = slide.images
    height, width = image.get_array().shape[:2]
    inside = (0 <= image.ox <= 1920 - width, 0 <= image.oy <= 1080 - height)
    assert all(inside)
    above = [text.get_window_extent() for text in slide.texts if text.get_position()[1] > 0.6]
    below = [text.get_window_extent() for text in slide.texts if text.get_position()[1] < 0.6]
    assert min(box.y0 for box in above) >= image.oy + height
    assert max(box.y1 for box in below) <= image.oy
    assert min(box.y0 for box in below) >= 0 and max(box.x1 for box in (*above, *below)) <= 1920
    assert slide.texts[-1].get_text().startswith("Source: tokenscale, rates.csv, SHA-256 ")


def test_expectations_stand_in_one_order_whether_or_not_a_report_was_imported_first():
    """Their sentences stand in tables in this order."""
    order = "from tokenscale.referee import expectations, validity\nprint(expectations.OF_A_RUN)"
    found = {
        re.sub(
            " at 0x[0-9a-f]+", "", subprocess.check_output([sys.executable, "-c", code], text=True)
        )
        for code in (order, f"import tokenscale.report.summary\n{order}")
    }
    assert len(found) == 1
