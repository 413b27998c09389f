"""What the page, the PDF and the report's folder say about one experiment, as plain values in a
file: computed here, laid out elsewhere.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from tokenscale.analysis.tables import digest as digest_tables
from tokenscale.analysis.tables import read_experiment
from tokenscale.base import wording
from tokenscale.base.files import canonical_json, read_record, sha256_text, write_sealed
from tokenscale.base.wording import listing
from tokenscale.costs.card import TextCard
from tokenscale.referee import comparability, statistics
from tokenscale.report import answers, campaign_quality, paired_comparisons, save
from tokenscale.report.captions import (
    as_sentence,
    caution,
    cells,
    describe_left_out,
    describe_spread,
    format_spread,
    group_by_cell,
)
from tokenscale.report.style import number
from tokenscale.report.table import Table, columns, count
from tokenscale.settings.experiments import STUDIES
from tokenscale.settings.registry import drawn_figures, missing_figures

#: key of an experiment's `original` → what its page calls it
HEADINGS = {
    "measured": "the study measured",
    "wrong": "what was wrong with it",
    "ours": "what is measured here, and why the numbers differ",
}


def describe_source_study(original: Mapping[str, Any]) -> dict[str, str]:
    """Heading → text, of what the experiment's file says; empty where it says nothing."""
    studies = "; ".join(
        f"{number}: {STUDIES.get(number, 'unknown')}" for number in original.get("studies") or ()
    )
    texts = {"studies": studies} | {
        heading: original.get(key) or "" for key, heading in HEADINGS.items()
    }
    return {heading: text for heading, text in texts.items() if text}


def source_study_table(parts: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each experiment that has an original, as `describe_source_study` has them."""
    found = ((part["name"], part["original"]) for part in parts if part["original"])
    rows = [
        [name, *(original.get(heading, "") for heading in HEADINGS.values())]
        for name, original in found
    ]
    return Table(columns("experiment", *HEADINGS.values()), rows)


#: queries of an experiment's description
QUERIES = (
    "inventory",
    "throughput",
    "order",
    "scaling",
    "stalls",
    "validation",
    "step_times",
    "stragglers",
    "energy",
    "generations",
    "padding",
    "dropped_text",
    "parallelism",
    "pipeline",
    "certificates",
    "training_loss",
)
#: signs that end a line, in place of which one is shown; and what stands for a sign that cannot be
#: printed
_NEWLINE = "↵"
_UNPRINTABLE = "\ufffd"
VALIDITY = ("valid", "suspect", "invalid", "missing")
#: tables of a description, in the order of the page's methods
TABLES = (
    "design",
    "throughput",
    "comparisons",
    "validation",
    "generations",
    "inventory",
    "quarantine",
    "steadiness",
)
#: the file of a description, beside the figures of its experiment
FILE = "description.json"


def write(name: str, tables: Path, path: Path) -> None:
    """Write the description of an experiment, which page, PDF and the report's folder read."""
    part = experiment(name, tables)
    part |= {key: asdict(part[key]) for key in TABLES}
    for proof in part["proof"]["parts"]:
        proof["table"] = asdict(proof["table"])
    write_sealed(path, record=part)


def read(path: Path) -> dict[str, Any]:
    """Read a description. Raises UserError if it is missing or was changed."""
    part = read_record(path, what="description of an experiment", next=f"snakemake -f {path}")
    part |= {key: Table(**part[key]) for key in TABLES}
    for proof in part["proof"]["parts"]:
        proof["table"] = Table(**proof["table"])
    return part


def experiment(name: str, tables: Path) -> dict[str, Any]:
    """Return all texts and tables on `<tables>/<name>`; see the keys below. Empty tables give empty
    parts.
    """
    folder = tables / name
    head = read_experiment(folder)
    design = head.get("cautions") or []
    with save.Tables(folder) as opened:
        rows = opened.rows
        runs, throughput, validation, scaling = map(
            rows, ("inventory", "throughput", "validation", "scaling")
        )
        compared, refused = paired_comparisons.read_comparisons(rows, head.get("primary"))
        dropped = answers.dropped_shares(rows("dropped_text"))
        compared = answers.note_dropped(compared, dropped, runs)
        verdicts = [c.verdict for c in compared if c.verdict != paired_comparisons.EXPLORATORY]
        planned = head.get("cell_repeats") or dict.fromkeys(
            runs["cell"].dropna(), head.get("repeats")
        )
        stores = opened.connection.execute("FROM stores").df()
        cautions = answers.find_cautions(
            runs,
            throughput,
            scaling=scaling,
            stragglers=rows("stragglers"),
            verdicts=verdicts,
            stores=stores,
            design=design,
            design_sha256=head.get("design_sha256") or "",
        )
        cautions += [
            f"The own figure {figure} is left out: {module} is not here."
            for figure, module in missing_figures(head).items()
        ]
        proof = campaign_quality.proof(rows("order"))
        figures = drawn_figures(head)
        crowded = caution(scaling)
        marks = [c["mark"] for c in design if c["mark"]]
        return {
            "name": name,
            **{key: head.get(key) or "" for key in ("question", "scale", "note")},
            "original": describe_source_study(head.get("original") or {}),
            "repeats": head.get("repeats"),
            "figures": figures,
            "runs": len(runs),
            "unknown": head.get("unknown") or [],
            "validity": {word: int((runs["validity"] == word).sum()) for word in VALIDITY},
            **_describe_origin(runs, stores),
            "digest": digest_tables(folder),
            "caution": crowded,
            "cautions": answers.caution_dropped(dropped) + cautions,
            "answers": answers.find_answers(
                rows,
                compared,
                proof=proof,
                figures=figures,
                caution=crowded,
                marks=marks,
            ),
            "registered": answers.describe_registration(runs, head.get("design_sha256") or ""),
            "design": campaign_quality.design(runs, planned, not_run=head.get("left_out") or []),
            "throughput": throughput_table(
                throughput,
                stalls=rows("stalls"),
                runs=runs,
                dropped=dropped,
            ),
            "comparisons": paired_comparisons.comparison_table(compared, refused),
            "validation": validation_table(validation, runs, dropped=dropped),
            "generations": generations_table(rows("generations")),
            "proof": proof,
            "inventory": campaign_quality.inventory_table(runs, validation),
            "quarantine": campaign_quality.quarantine_table(opened.connection),
            "steadiness": campaign_quality.steadiness(rows("step_times"), throughput),
            "campaign": campaign_text(throughput, runs, planned=planned),
            "energy": campaign_quality.energy(rows("energy")),
        }


def tables_digest(parts: Sequence[dict[str, Any]]) -> str:
    """Return the digest of all tables that parts describe: of one experiment that of its tables'
    manifest.
    """
    digests = [part["digest"] for part in parts]
    return digests[0] if len(digests) == 1 else sha256_text(canonical_json(digests))


def list_cautions(part: dict[str, Any]) -> list[str]:
    """Return what a reader must know before the answers of an experiment, a sentence each."""
    found = list(part.get("cautions") or [])
    if part["caution"]:
        found.append(as_sentence(f"{part['caution']} (world sizes above one)").strip())
    if part["scale"] == "demo":
        found.append(
            "This is demo scale: conclusions are not transferable to larger models or other "
            "machines."
        )
    return found


def shared_cautions(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the cautions that all of several experiments have, which a report states once; none of
    a single one.
    """
    if len(parts) < 2:
        return []
    first, *others = map(list_cautions, parts)
    return [text for text in first if all(text in other for other in others)]


def campaign_text(
    throughput: pd.DataFrame, runs: pd.DataFrame, planned: Mapping[str, int | None]
) -> str:
    """Return sentences on the order in which runs were started, on drift, and on the noise between
    runs of equal settings. `planned` is cell → repeats; further repeats are runs of the canary.
    """
    order = statistics.order_kept(
        runs["position"].astype(float), started_s=runs["started_unix_s"].astype(float)
    )
    if not order.pairs:
        return ""
    negation = "not " if order.verdict.startswith("not ") else ""
    text = f"Runs were {negation}started {order.verdict.removeprefix('not ')}"
    text += (
        f" ({order.inversions} of {paired_comparisons.in_pairs(order.pairs)} reversed)"
        if order.inversions
        else ""
    )
    drift = paired_comparisons.measure_drift(throughput, runs)
    if drift.verdict != "drift":  # which is a caution
        text += f". Drift of useful tokens per second over the campaign: {drift.verdict}"
        shown = f"{paired_comparisons.format_share(drift)} from first to last start, "
        shown += f"p = {number(drift.p, 2)}"
        text += f" ({shown})" if drift.verdict != "too few runs" else ""
    timed = throughput.merge(runs[["run_id", "cell", "started_unix_s", "external"]], on="run_id")
    canary = timed[campaign_quality.of_canary(timed, planned)].dropna(subset=["started_unix_s"])
    if len(canary) > 1:
        difference = statistics.noise_floor(
            canary.sort_values("started_unix_s")["useful_tokens_per_s"]
        )
        range_ = (
            f", {number(100 * difference.low)}–{number(100 * difference.high)} %"
            if difference.n > 1
            else ""
        )
        text += (
            f". Noise floor: neighbouring runs of the canary ({canary['series'].iloc[0]}) differ "
            "by "
        )
        text += (
            f"{number(100 * difference.median)} % "
            f"({paired_comparisons.in_pairs(difference.n)}{range_})"
        )
    return f"{text}."


def throughput_table(
    throughput: pd.DataFrame, stalls: pd.DataFrame, runs: pd.DataFrame, dropped: answers.Dropped
) -> Table:
    """Return a row for each series and world size: medians with their spread; runs that no
    comparison of approaches uses are counted beside the others.
    """
    head, cell = _dropped_column(dropped, rows=throughput)
    refusals = comparability.refusals(runs, factor="approach")
    refused = comparability.refused(refusals)
    shares = answers.not_useful_shares(throughput[~throughput["run_id"].isin(refused)])
    rows = []
    for name, world, group in cells(throughput):
        stall = stalls[(stalls["series"] == name) & (stalls["world_size"] == world)][
            "data_stall_share"
        ]
        out = f" ({n} not compared)" if (n := group["run_id"].isin(refused).sum()) else ""
        rows.append(
            [
                *(name, str(world), f"{len(group)}{out}"),
                *(format_spread(group[f"{kind}_tokens_per_s"]) for kind in ("useful", "total")),
                number(100 * shares.get((name, world), group["not_useful_share"].median())),
                format_spread(1e3 * group["median_step_s"]),
                format_spread(100 * stall),
                *cell(name),
            ]
        )
    heads = columns(
        "approach",
        ">world size",
        ">runs",
        ">useful tokens / s",
        ">total tokens / s",
        ">not useful (%)",
        ">median step (ms)",
        ">data stall (%)",
        *head,
    )
    text = "Medians over runs, their spread in brackets; after warm-up, sum over sum."
    notes = [
        text,
        describe_spread(group_by_cell(throughput, column="useful_tokens_per_s")),
        describe_left_out(runs),
        comparability.sentences(refusals),
    ]
    return Table(columns=heads, rows=rows, caption=" ".join(filter(None, notes)))


def validation_table(
    validation: pd.DataFrame, runs: pd.DataFrame, dropped: answers.Dropped
) -> Table:
    """A row a series and world size: the loss after the last step."""
    head, cell = _dropped_column(dropped, rows=validation)
    _, unit = answers.share_unit(validation, runs)
    shared = unit == answers.NATS
    counted = validation["accuracy"].notna().any()
    rows = []
    for name, world, group in cells(validation):
        last = group[group["last"].astype(bool)]
        first = group[group["step"] == 0]
        rows.append(
            [
                *(
                    name,
                    str(world),
                    str(len(last)),
                    format_spread(last["step"]),
                    format_spread(last["useful_tokens_seen"]),
                ),
                *(
                    format_spread(first["loss"], digits=5),
                    format_spread(last["loss"], digits=5),
                    format_spread(last["perplexity" if shared else "bits_per_byte"].dropna()),
                ),
                *([format_spread(100 * last["accuracy"].dropna())] if counted else []),
                *cell(name),
            ]
        )
    heads = columns(
        "approach",
        ">world size",
        ">runs",
        ">steps",
        ">useful tokens trained on",
        ">first loss",
        ">last loss",
        ">perplexity" if shared else ">bits per byte",
        *([">accuracy (%)"] if counted else []),
        *head,
    )
    text = (
        "Loss in nats per useful token on one fixed held-out slice, "
        + ("the same rows for every approach" if shared else "not comparable between vocabularies")
        + f", attention {listing(sorted(validation['attention'].dropna().unique()))}; "
        "medians, their spread "
    )
    ends = validation[validation["last"].astype(bool)]
    spread = describe_spread(group_by_cell(ends, column="loss"))
    text += "in brackets." + (" Accuracy: labels that have the largest logit." if counted else "")
    after = answers.describe_equal_tokens(validation) if shared else ""
    return Table(
        columns=heads,
        rows=rows,
        caption=" ".join(filter(None, [text, spread, after])),
    )


def _dropped_column(
    dropped: answers.Dropped, rows: pd.DataFrame
) -> tuple[list[str], Callable[[str], list[str]]]:
    """Return the head of the column of dropped text, and its cell of a series; nothing where no
    series drops any.
    """
    if not any(answers.describe_dropped(dropped.get(name, {})) for name in rows["series"].unique()):
        return [], lambda name: []
    return [">text dropped"], lambda name: [
        answers.describe_dropped(dropped.get(name, {})) or "0 %"
    ]


def describe_text(corpus: str, tokenizer: str, stores: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return the card of a training text, as far as its stores tell it. `runs` trained on it."""
    name = f"corpus {corpus}, tokenizer {tokenizer}"
    of_text = stores[
        (stores["corpus"] == corpus)
        & (stores["tokenizer"] == tokenizer)
        & (stores["split"] == "train")
    ].dropna(subset=["document_tokens", "text_bytes"])
    if of_text.empty:
        return name
    counted = of_text.dropna(subset=["median_tokens"])
    first = (counted if len(counted) else of_text).iloc[0]
    quantiles = None
    if len(counted):
        quantiles = (first["median_tokens"], first["tokens_95"], first["largest_tokens"])
    card = TextCard(
        documents=first["documents"],
        text_bytes=first["text_bytes"],
        dropped=json.loads(first["dropped"]) if isinstance(first["dropped"], str) else {},
        tokens=first["document_tokens"],
        quantiles=quantiles,
    )
    masks = set(runs.loc[runs["approach"] == "packed", "document_mask"])
    seen = {
        frozenset({True}): ", which do not see each other",
        frozenset({False}): ", which see each other (document_mask: false)",
    }.get(frozenset(masks), "")
    held = [
        f"a packed row of {int(length):,} holds about {length / mean:,.1f} documents{seen}"
        for length in sorted(of_text["sequence_length"].dropna().unique())
        if (mean := first["document_tokens"] / first["documents"]) < length
    ]
    lines = [f"{int(first['documents']):,} documents", *card.describe(), *held]
    return f"{name} ({'; '.join(lines)})"


def _describe_origin(runs: pd.DataFrame, stores: pd.DataFrame) -> dict[str, Any]:
    """Corpora and tokenizers (`text`), machines, commits, first and last day (UTC) and versions of
    packages of runs.
    """
    named = runs.dropna(subset=["corpus", "tokenizer"])
    known = runs.dropna(subset=["git_commit"])
    pairs = sorted({(r.corpus, r.tokenizer) for r in named.itertuples()})
    texts = [
        describe_text(
            corpus,
            tokenizer,
            stores=stores,
            runs=named[(named["corpus"] == corpus) & (named["tokenizer"] == tokenizer)],
        )
        for corpus, tokenizer in pairs
    ]
    commits = {
        (r.git_commit, pd.notna(r.git_dirty) and bool(r.git_dirty)) for r in known.itertuples()
    }
    ends = (
        [runs["started_unix_s"].min(), runs["stopped_unix_s"].max()]
        if runs["started_unix_s"].notna().any()
        else []
    )
    days = dict.fromkeys(f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d}" for t in ends)
    machines = set[str]()
    versions = dict[str, set[str]]()
    for r in runs.dropna(subset=["device"]).itertuples():
        cpu = (r.cpu or "unknown CPU") + ("" if pd.isna(r.cores) else f", {int(r.cores)} cores")
        machines.add(cpu if r.device == "cpu" else f"{r.device} ({cpu})")
    for packages in map(json.loads, runs["versions"].dropna()):
        for package, version in packages.items():
            versions.setdefault(package, set()).add(str(version))
    return {
        "text": "; ".join(texts),
        "machines": sorted(machines),
        "commits": [{"commit": commit[:12], "dirty": dirty} for commit, dirty in sorted(commits)],
        "data_from": " to ".join(days),
        "versions": {package: ", ".join(sorted(found)) for package, found in versions.items()},
    }


def describe_unknown(parts: Sequence[dict[str, Any]]) -> str:
    """Count the facts that the records of these experiments lack, and say why; empty if none is.

    >>> fact = {"fact": "git.commit", "why": "git is not installed", "records": 4}
    >>> describe_unknown([{"unknown": [fact]}])
    '4 facts unknown: git.commit of 4 records (git is not installed)'
    """
    facts = [fact for part in parts for fact in part["unknown"]]
    if not facts:
        return ""
    named = dict.fromkeys(
        f"{fact['fact']} of {wording.count(fact['records'], 'record')} ({fact['why']})"
        for fact in facts
    )
    total = wording.count(sum(fact["records"] for fact in facts), "fact")
    return f"{total} unknown: {'; '.join(named)}"


def generations_table(generations: pd.DataFrame) -> Table:
    """Return a row for each answer of `generations.sql`; the caption says in how many the cache
    changed a token.
    """
    heads = columns("prompt", "text behind it", "sampling", ">tokens", "model", ">steps", "run")
    rows = []
    for r in generations.itertuples():
        texts = (_printable(r.prompt), _printable(r.text), _describe_sampling(r))
        rows.append([*texts, count(r.tokens), str(r.model), count(r.model_step), str(r.run_id)])
    if not rows:
        return Table(heads, rows=[])
    same = generations["same_uncached"].dropna().astype(bool)
    compared = f"{int(same.sum())} of {len(same)} answers are the same, token by token."
    text = (
        f"Without the cache of keys and values {compared}"
        if len(same)
        else "No model here keeps keys and values."
    )
    return Table(
        columns=heads,
        rows=rows,
        caption=f"Final weights of each run; {_NEWLINE} is the end of a line. {text}",
    )


def _printable(text: str | None) -> str:
    """Return a text as one line, with marked line ends; what cannot be printed is replaced.

    >>> _printable("a\\n\\tb\\x00 <b>")
    'a↵ b� <b>'
    """
    marked = _NEWLINE.join((text or "").splitlines()) + _NEWLINE * (text or "").endswith("\n")
    return "".join(map(_replace_unprintable, marked))


def _replace_unprintable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else _UNPRINTABLE


def _describe_sampling(row: Any) -> str:
    if row.temperature == 0:
        return "greedy"
    limits = [
        f"top_k {int(row.top_k)}" if row.top_k else "",
        f"top_p {number(row.top_p)}" if row.top_p < 1 else "",
    ]
    return ", ".join(
        filter(None, [f"temperature {number(row.temperature)}", *limits, f"seed {int(row.seed)}"])
    )
