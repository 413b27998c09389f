"""Checklists of the field, filled in from what the tables say; what only an author can answer is left to the author."""

from typing import Any

from tokenscale.analysis.statistics import order_statistic_rank
from tokenscale.report.style import number
from tokenscale.report.table import Table

MET, PARTLY, NOT_MET, NONE, AUTHOR = "met", "partly", "not met", "does not apply", "author must answer"
COLUMNS = [("item", False), ("state", False), ("evidence", False)]

Item = tuple[str, str, str]


def scientific_benchmarking(part: dict[str, Any]) -> Table:
    """The twelve rules of Hoefler & Belli (SC 2015), in our words, for one experiment."""
    facts = part["facts"]
    rules = [
        _base(facts),
        _parts_used(part),
        ("rates are sums over sums", MET, "every rate is a sum of tokens over a sum of seconds, in SQL"),
        ("ratios are not averaged", MET, "ratios are of medians, or medians over pairs; none is averaged"),
        _variation(facts),
        (
            "no distribution is assumed",
            MET,
            "intervals from order statistics, tests by permutation; required numbers of runs from a noise model",
        ),
        _tests(part),
        (
            "the tail is shown, too",
            *_if(part["steadiness"].rows, "95th and 99th percentile and slowest step, per cell"),
        ),
        _setup(facts),
        _timing(facts),
        _bounds(part),
        ("all points are shown", MET, "every run is a point; lines join steps, tokens and numbers of ranks"),
    ]
    return Table(COLUMNS, [[f"{i}. {what}", state, why] for i, (what, state, why) in enumerate(rules, 1)])


def _if(there: Any, evidence: str) -> tuple[str, str]:
    return (MET, evidence) if there else (NONE, "no run that counts")


def _state_if_used(used: bool, evidence: str) -> tuple[str, str]:
    """Met where there is something to say."""
    return _if(used, evidence) if evidence or not used else (NOT_MET, "not recorded")


def _of_runs(facts: dict[str, Any], fact: str, evidence: str, missing: str = "not recorded") -> tuple[str, str]:
    """Met where it is known of all runs that count."""
    known, used = facts[fact], facts["runs_used"]
    if not known:
        return (NOT_MET, missing) if used else _if(used, evidence)
    return (MET, evidence) if known == used else (PARTLY, f"{evidence}; of {known} of {used} runs")


def _base(facts: dict[str, Any]) -> Item:
    what = "a speed-up has its base, in absolute terms"
    if not facts["bases"]:
        return what, NONE, "nothing is compared with one process"
    return what, MET, "; ".join(facts["bases"])


def _parts_used(part: dict[str, Any]) -> Item:
    left = part["validity"]["missing"] + part["validity"]["invalid"]
    what = "what is left out has a reason"
    if not part["runs"]:
        return what, NONE, "no run is listed"
    if not left:
        return what, MET, "every run of the design is present and counts"
    return (
        what,
        PARTLY,
        f"{left} of {part['runs']} runs are missing or invalid; the inventory names them and the reasons",
    )


def _variation(facts: dict[str, Any]) -> Item:
    what = "what varies has an interval"
    fewest = facts["fewest_repeats"]
    if not fewest:
        return what, NONE, "no run that counts"
    if order_statistic_rank(fewest) is not None:
        return what, MET, f"{fewest} repeats a cell or more: order-statistic intervals of the median"
    state = PARTLY if fewest > 1 else NOT_MET
    return (
        what,
        state,
        f"{fewest} repeat{'s' * (fewest > 1)} in a cell: "
        + ("a range is no interval" if fewest > 1 else "nothing is known about its spread"),
    )


def _tests(part: dict[str, Any]) -> Item:
    compared = len(part["comparisons"].rows)
    what = "differences are tested"
    if not compared:
        return what, NONE, "no two approaches with runs of one repeat"
    text = f"{compared} paired comparisons by permutation, corrected after Holm"
    few = sum("too few runs" in row for row in part["comparisons"].rows)
    return (what, MET, text) if not few else (what, PARTLY, f"{text}; too few runs in {few}")


def _setup(facts: dict[str, Any]) -> Item:
    what = "factors and set-up are recorded"
    if not facts["runs_used"]:
        return what, NONE, "no run that counts"
    texts = [f"{facts['sealed']} of {facts['runs_used']} records sealed"]
    if facts["dirty"]:
        texts.append(f"{facts['dirty']} with uncommitted code, whose diff is stored with the record")
    return what, MET if facts["sealed"] == facts["runs_used"] else PARTLY, "; ".join(texts)


def _timing(facts: dict[str, Any]) -> Item:
    what = "how parallel time is taken"
    text = "a step lasts from the end of the previous step until its device is done, on the slowest rank"
    if facts["external"]:
        return what, PARTLY, f"{text}; {facts['external']} runs of other programs timed themselves"
    return what, MET, text


def _bounds(part: dict[str, Any]) -> Item:
    facts = part["facts"]
    bounds = {
        "tokenization_benchmark": ("a copy in memory", part["benchmarks"]),
        "data_stall_share": ("Amdahl's bound of any gain in reading", facts["runs_used"]),
        "scaling_throughput": ("ideal scaling", facts["bases"]),
        "pipeline_bubble": ("the schedule's own bubble", facts["runs_used"]),
        "mfu_comparison": ("the peak of the device", facts["peaks"]),
    }
    drawn = [text for name, (text, there) in bounds.items() if name in part["figures"] and there]
    return "upper bounds are shown", *((MET, ", ".join(drawn)) if drawn else (NONE, "no figure has a known bound"))


def reproducibility(part: dict[str, Any]) -> Table:
    """What checklists of conferences ask of experiments (NeurIPS, EMNLP), with the sentence to paste."""
    facts = part["facts"]
    hours = number(facts["device_s"] / 3600)
    repeats = f"{facts['fewest_repeats']} to {facts['most_repeats']}"
    if facts["fewest_repeats"] == facts["most_repeats"]:
        repeats = str(facts["fewest_repeats"])
    used = bool(facts["runs_used"])
    items: list[Item] = [
        (
            "number of runs",
            *_if(used, f"{facts['runs_used']} runs that count, {repeats} a cell, each repeat with its own seed"),
        ),
        ("what an error bar is", *_state_if_used(used, facts["kinds"])),
        ("computing infrastructure", *_state_if_used(used, "; ".join(part["machines"]))),
        ("time to compute", *_of_runs(facts, "timed", f"{hours} device-hours from first to last event, data left out")),
        ("data", *_state_if_used(used, part["text"])),
        ("software", *_state_if_used(used, ", ".join(f"{p} {v}" for p, v in part["versions"]))),
        ("energy", *_of_runs(facts, "metered", facts["energy"], "no device has an energy counter")),
        (
            "how hyper-parameters were chosen",
            AUTHOR,
            "the settings are in the runs' records, without the reasons for them",
        ),
        ("limits, licences, and what may be harmed", AUTHOR, ""),
    ]
    return Table(COLUMNS, [list(item) for item in items])


def artifact(parts: list[dict[str, Any]]) -> Table:
    """What artifact evaluations ask (ACM badges, EuroSys, cTuning)."""
    facts = {
        fact: sum(p["facts"][fact] for p in parts) for fact in ("runs_used", "timed", "committed", "dirty", "device_s")
    }
    runs, hours = facts["runs_used"], number(facts["device_s"] / 3600)
    items: list[Item] = [
        ("available: archived, with an identifier", AUTHOR, "put this folder and the repository into an archive"),
        ("exact version", *_version(facts)),
        ("licence", MET, "LICENSE and CITATION.cff of the repository"),
        ("environments and installation", MET, "pyproject.toml, environment.yml; `make setup`"),
        ("smallest example", MET, "`make run`"),
        ("one command for each claim", MET, "`snakemake EXPERIMENT`, `snakemake claims`"),
        (
            "time and machines",
            *_of_runs(facts, "timed", f"{hours} device-hours for {runs} runs, on the machines above"),
        ),
        ("raw data behind figures", MET, "data/ and figures/ beside this page; logs in results/runs/"),
    ]
    return Table(COLUMNS, [list(item) for item in items])


def _version(facts: dict[str, Any]) -> tuple[str, str]:
    state, evidence = _of_runs(facts, "committed", "commits above")
    return (
        (PARTLY, f"{evidence}; some code was not committed") if state == MET and facts["dirty"] else (state, evidence)
    )
