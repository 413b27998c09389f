"""Advise on formats for your own text: padding, cut text and bytes, estimated from a sample with intervals."""

import argparse
import math
import re
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tokenscale.base.errors import UserError
from tokenscale.base.files import expand_path
from tokenscale.cli.advise_sample import FLAGS, AdviceSettings, SampleMeasurements, measure
from tokenscale.cli.pretokenize_file import reword_for_flags, unescape
from tokenscale.costs import data as costs
from tokenscale.data.corpus.files import expand_patterns
from tokenscale.data.corpus.sample import draw_sample
from tokenscale.data.order.packing import best_fit_decreasing, split_documents
from tokenscale.data.tokenizers import losses
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.data.tokenizers.huggingface import BUILT, resolve_tokenizer
from tokenscale.data.tokenizers.load import build, load_tokenizer
from tokenscale.settings import flags
from tokenscale.settings.data import SourceSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.yaml_files import read_yaml


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers for JSON, with null for infinity."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {name: float(n) if math.isfinite(n) else None for name, n in numbers.items()}


#: most documents, and characters at the beginning of each, that are decoded to measure what the tokenizer loses
LOSS_DOCUMENTS, LOSS_CHARACTERS = 256, 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the files and the planned training."""

    parser.usage = "%(prog)s FILE … [--tokenizer NAME] [--sequence-length N] [--tokens-per-second X] [options]"
    parser.add_argument(
        "files",
        nargs="+",
        type=expand_path,
        metavar="FILE",
        help="Parquet, JSON lines or text; also patterns ('*.jsonl')",
    )
    flags.add_flags(parser, FLAGS)


def run(arguments: argparse.Namespace) -> None:
    """Print the advice, and write the facts if --json is given."""
    from tokenscale.base.files import write_json

    settings = AdviceSettings(**flags.parse_flags(arguments, FLAGS))
    facts = advise(settings, tuple(arguments.files), print)
    print(render(facts))
    if settings.json:
        write_json(Path(settings.json), to_json(facts))


LENGTHS = (512, 1024, 2048, 4096, 8192)


def advise(settings: AdviceSettings, files: tuple[str, ...], log: Callable[[str], None] = print) -> dict[str, Any]:
    """Return all facts, as `--json` writes them and `render` prints them. `log` receives a line before each long step.

    Raise UserError for files and tokenizers that cannot be read, and for a data set of fewer than two documents.
    """
    source = SourceSettings(
        kind="files",
        files=files,
        text_column=settings.text_column,
        separator=None if settings.separator is None else unescape(settings.separator),
    )
    try:
        paths = expand_patterns(files)
        found = draw_sample(paths, source, settings.documents, SEED)
    except UserError as error:
        raise _reword_for_flags(error) from None
    with tempfile.TemporaryDirectory(prefix="tokenscale-") as folder:
        tokenizer = _load_tokenizer(settings.tokenizer, Path(folder), log)
        some = found.texts[:: -(-len(found.texts) // LOSS_DOCUMENTS)]
        log(losses.describe(tokenizer, losses.measure(tokenizer, [text[:LOSS_CHARACTERS] for text in some], files[0])))
        measured = measure(found, tokenizer, settings.sequence_length, Path(folder))
    size = sum(path.stat().st_size for path in paths)
    return _collect_facts(settings, files, [str(path) for path in paths], size, measured)


def _reword_for_flags(error: UserError) -> UserError:
    error = reword_for_flags(error)
    facts = {label: text for label, text in error.facts.items() if (label, text) != ("flag", "source.files")}
    what = error.what.replace("a source's", "the").replace("a source names", "the input names")
    return UserError(what.replace("a source file", "a file"), **facts)


def _load_tokenizer(name: str, folder: Path, log: Callable[[str], None]) -> Tokenizer:
    try:
        requested = resolve_tokenizer(name)
    except UserError as error:
        facts = {label: text.replace("--tokenizer-name", "--tokenizer") for label, text in error.facts.items()}
        raise UserError(error.what, **facts) from None
    if requested.note:
        log(requested.note)
    directory = requested.directory
    if directory is None or not (directory / "manifest.json").is_file():
        directory = folder / requested.settings.name
        log(f"building the tokenizer {requested.settings.name}, which is not in {BUILT}")
        build(requested.settings, directory)
    tokenizer = load_tokenizer(directory)
    for note in getattr(tokenizer, "notes", ()):  # which faster engines were not used, and why
        log(note)
    return tokenizer


# -- measuring


def _collect_facts(
    settings: AdviceSettings, given: tuple[str, ...], files: list[str], file_bytes: int, measured: SampleMeasurements
) -> dict[str, Any]:
    estimator = Estimator(measured)
    lengths, wanted = measured.lengths, settings.sequence_length
    by_length = {t: estimate_length(estimator, t) for t in sorted({*LENGTHS, wanted})}
    facts: dict[str, Any] = {
        "files": files,
        "file_bytes": file_bytes,
        "sampled": {
            "documents": len(lengths),
            "text_bytes": int(measured.text_bytes.sum()),
            "where": measured.sample.where,
            "every_document": estimator.unseen == 0.0,
        },
        "tokenizer": {
            "name": measured.tokenizer.name,
            "engine": " ".join(filter(None, (measured.tokenizer.engine, measured.tokenizer.engine_version))),
        },
        "sequence_length": wanted,
        "tokens_per_second": settings.tokens_per_second,
        "documents": estimator.estimate_total(np.ones(len(lengths))),
        "text_bytes": estimator.estimate_total(measured.text_bytes),
        "tokens": estimator.estimate_total(lengths),
        "tokens_per_document": estimator.estimate(lambda w: costs.mean(lengths, w)),
        "sequence_lengths": {str(t): row for t, row in by_length.items()},
        "formats": estimate_formats(estimator, wanted, by_length[wanted]["fill_packed"]),
        "tokenizing": estimate_tokenizing(estimator, settings.tokens_per_second),
    }
    facts["choice"], facts["reason"] = choose_format(by_length[wanted])
    facts["configuration"] = make_configuration(settings, given, facts["choice"])
    facts["next"] = "make run CONFIG=mine.yaml"
    return facts


def make_configuration(
    settings: AdviceSettings, files: tuple[str, ...], chosen: str, root: Path = Path()
) -> dict[str, dict[str, Any]]:
    """Return file → YAML values to paste: the corpus, its tokenizer, and an experiment in the advised format.

    Paths stay as given inside a project's folder, from which they are resolved, and are absolute elsewhere.
    """
    in_project = (root / "workflow/Snakefile").is_file()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(files[0]).name.split(".")[0]).strip("._-")
    name = f"my-{stem or 'text'}"[:80]
    source: dict[str, Any] = {"files": [f if in_project else str(Path(f).resolve()) for f in files]}
    for key in ("text_column", "separator"):
        if (value := getattr(settings, key)) != getattr(AdviceSettings, key):
            source[key] = unescape(value) if key == "separator" else value
    values: dict[str, Any] = {"corpora": {name: {"source": source}}, "experiments": [name]}
    tokenizer = resolve_tokenizer(settings.tokenizer)
    known = read_yaml(root / "config/config.yaml").get("tokenizers") or {} if in_project else {}
    if tokenizer.settings.name not in known:
        kind, described = tokenizer.settings.kind, to_dict(tokenizer.settings)
        described.pop("name", None)
        if kind == "bpe":  # its training corpus is not known here
            kind, described = "huggingface", {"source": str(tokenizer.directory)}
        values["tokenizers"] = {tokenizer.settings.name: {"kind": kind} | described}
    experiment = {
        "question": f"How fast does llama-tiny train on {name}?",
        "runs": {
            "corpus": name,
            "tokenizer": tokenizer.settings.name,
            "approach": {"padded": "pretokenized-padded"}.get(chosen, chosen),
            "sequence_length": settings.sequence_length,
            "model": "llama-tiny",
            "budget": {"steps": 100},
        },
        "figures": ["loss_over_time", "tokens_per_second_comparison"],
    }
    return {"mine.yaml": values, f"config/experiments/{name}.yaml": experiment}


def to_json(value: Any) -> Any:
    """Convert the facts to plain values."""
    if isinstance(value, Estimate):
        return value.to_dict()
    return {key: to_json(v) for key, v in value.items()} if isinstance(value, dict) else value


RESAMPLES = 200
#: resamples whose packing is recomputed
PACKINGS = 50
SEED = 0
#: with fewer long documents in the sample than this, their count bounds the estimate, because resamples vary too little
FEW = 30
#: below this gain in useful tokens, and with fewer tokens cut, padded rows are as good as packed ones
LEAST_GAIN, LEAST_CUT = 0.02, 0.001


class Estimator:
    """Estimator of a data set's facts from the documents of a sample and resamples of them."""

    def __init__(self, measured: SampleMeasurements):
        found = measured.sample
        self.measured, self.lengths = measured, measured.lengths
        self.weights = costs.bootstrap_weights(found.units, found.unit_count, RESAMPLES, SEED)
        # finite population: seen documents are certain
        seen = len(found.texts) / found.documents if found.counted and found.unit_count == len(found.texts) else 0.0
        self.unseen = math.sqrt(max(0.0, 1 - seen))
        self.documents = found.documents
        count = len(measured.batch_s)
        batches = costs.bootstrap_weights(np.arange(count), count, RESAMPLES, SEED + 1)
        #: tokens a second and core, and the same of each resample
        self.speed = float(costs.ratio(measured.batch_tokens, measured.batch_s))
        self.speeds = costs.ratio(measured.batch_tokens, measured.batch_s, batches)

    def estimate(self, function: Callable[[np.ndarray | None], Any]) -> Estimate:
        """Estimate a function of the documents' weights."""
        return self.add_interval(float(function(None)), function(self.weights))

    def estimate_total(self, per_document: np.ndarray) -> Estimate:
        """Estimate a sum over all documents of the data set."""
        mean = float(costs.mean(per_document))
        if self.measured.sample.counted:
            return self.add_interval(mean * self.documents, costs.mean(per_document, self.weights) * self.documents)
        scale = self.documents / len(per_document)  # the number of documents is estimated, too
        return self.add_interval(mean * self.documents, self.weights @ np.asarray(per_document, dtype=float) * scale)

    def add_interval(self, value: float, values: np.ndarray, certain: bool = True) -> Estimate:
        """Return a value with its interval. `certain`: exactly known if every document was seen."""
        low, high = costs.interval(values)
        if certain:
            low, high = (value + (bound - value) * self.unseen for bound in (low, high))
        return Estimate(value, min(low, value), max(high, value))

    def estimate_speed(self, function: Callable[[Any], Any]) -> Estimate:
        """Estimate a function of the tokenizer's tokens per second and core."""
        return self.add_interval(float(function(self.speed)), function(self.speeds), certain=False)

    def estimate_fill(self, sequence_length: int) -> Estimate:
        """Estimate the share of useful positions in packed rows.

        More documents pack better: the unused share falls about as one over their number. The loss of half the sample
        against the whole is therefore what all documents gain (as is a third of the loss of a quarter). The upper end
        counts it three times more, up to full rows.
        """
        lengths = self.lengths
        value = compute_packed_fill(lengths, sequence_length)
        if self.unseen == 0:
            return Estimate(value, value, value)
        lost = [
            value - float(np.mean([compute_packed_fill(lengths[i::k], sequence_length) for i in range(k)]))
            for k in (2, 4)
        ]
        more = max(0.0, lost[0], lost[1] / 3) * max(0.0, 1 - len(lengths) / self.documents)
        drawn = (np.repeat(lengths, weights.astype(int)) for weights in self.weights[:PACKINGS])
        low, high = costs.interval([compute_packed_fill(some, sequence_length) for some in drawn])
        most = self.estimate(lambda w: costs.bound_fill(lengths, sequence_length, w))
        row = sequence_length / (
            self.documents * max(1.0, float(np.mean(lengths - 1)))
        )  # one row more or less, relative to all
        value = min(most.value, value + more)
        return Estimate(value, min(value, low) - row, min(most.high, max(value, high) + 3 * more))


def compute_packed_fill(lengths: np.ndarray, sequence_length: int) -> float:
    """Return the share of useful positions if these documents are packed."""
    rows = len(best_fit_decreasing(split_documents(lengths, sequence_length)[2], sequence_length + 1)[1]) - 1
    return costs.fill_share(lengths, sequence_length, rows)


def estimate_length(estimator: Estimator, t: int) -> dict[str, Any]:
    lengths = estimator.lengths
    fill = estimator.estimate_fill(t)
    padding = estimator.estimate(lambda w: costs.padding_share(lengths, t, w))
    cut_tokens = estimator.estimate(lambda w: costs.cut_share(lengths, t, w))
    cut_documents = estimator.estimate(lambda w: costs.cut_documents_share(lengths, t, w))
    seen = int(np.count_nonzero(lengths - 1 > t))
    if seen == 0:  # a sample without long documents has resamples without them
        share, tokens = costs.bound_unseen_cut(lengths)
        cut_tokens = Estimate(0.0, 0.0, tokens * estimator.unseen)
        cut_documents = Estimate(0.0, 0.0, share * estimator.unseen)
    elif seen < FEW:
        cut_tokens, cut_documents = (
            Estimate(
                e.value, e.low, max(e.high, e.value * (1 + (costs.bound_count(seen) / seen - 1) * estimator.unseen))
            )
            for e in (cut_tokens, cut_documents)
        )
    gain = estimator.estimate(lambda w: fill.value / (1 - costs.padding_share(lengths, t, w)))
    return {
        "padding": padding,
        "cut": cut_tokens,
        "cut_documents": cut_documents,
        "fill_packed": fill,
        "gain": Estimate(gain.value, gain.low * fill.low / fill.value, gain.high * fill.high / fill.value),
    }


def estimate_formats(estimator: Estimator, t: int, fill: Estimate) -> dict[str, Any]:
    lengths = estimator.lengths
    useful, kept = lengths - 1, np.minimum(lengths - 1, t)
    packed = estimator.estimate_total(useful)
    ends = (packed.low / fill.high, packed.high / fill.low)
    positions = {
        "padded": estimator.estimate_total(np.full(len(lengths), t)),
        "token-list": estimator.estimate_total(lengths),
        "packed": Estimate(packed.value / fill.value, *ends),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, bytes_each in estimator.measured.stored.items():
        found[name] = {
            "tokens": positions.get(name, positions["token-list"]),
            "useful_tokens": estimator.estimate_total(kept if name == "padded" else useful),
            "bytes": estimator.estimate_total(bytes_each),
        }
    return found


def estimate_tokenizing(estimator: Estimator, rate: float | None) -> dict[str, Any]:
    measured = estimator.measured
    text_bytes_per_token = measured.text_bytes.sum() / max(1, (measured.lengths - 1).sum())
    found: dict[str, Any] = {
        "tokens_per_core_s": estimator.estimate_speed(lambda s: s),
        "text_bytes_per_core_s": estimator.estimate_speed(lambda s: s * text_bytes_per_token),
        "rate_at_stall_0.01": estimator.estimate_speed(lambda s: costs.rate_at_stall(0.01, s)),
        "rate_at_stall_0.1": estimator.estimate_speed(lambda s: costs.rate_at_stall(0.1, s)),
    }
    if rate:
        found["core_share"] = estimator.estimate_speed(lambda s: costs.core_share(rate, s))
        found["step_share"] = estimator.estimate_speed(lambda s: costs.stall_share(rate, s))
    return found


def choose_format(at: dict[str, Estimate]) -> tuple[str, str]:
    """Return the advised format and the reason in one sentence."""
    if at["gain"].value - 1 < LEAST_GAIN and at["cut"].value < LEAST_CUT:
        return "padded", (
            f"documents fill their rows: padding takes {format_percent(at['padding'])} of the positions and "
            f"{format_percent(at['cut'])} of the tokens are cut, so packing would gain less than {LEAST_GAIN:.0%}"
        )
    cuts = f", where padded rows also drop {format_percent(at['cut'])} of them" if at["cut"].value >= LEAST_CUT else ""
    return "packed", (
        f"{format_ratio(at['gain'])} as many useful tokens from the same step as padded rows{cuts}; nothing is dropped"
    )


def render(facts: dict[str, Any]) -> str:
    """Format the facts for a terminal of 100 columns."""
    sampled, tokenizing, wanted = facts["sampled"], facts["tokenizing"], facts["sequence_length"]
    more = f" and {len(facts['files']) - 1:,} more" if len(facts["files"]) > 1 else ""
    lines = [
        f"{Path(facts['files'][0]).name}{more}",
        f"holds {_format_count(facts['documents'])} documents, {_format_bytes(facts['text_bytes'])} of text, "
        f"{_format_count(facts['tokens'])} tokens",
        f"sampled {sampled['documents']:,} documents ({sampled['text_bytes'] / 1e6:.1f} MB; {sampled['where']}); "
        "lo–hi: 95 % intervals",
        f"tokenizer {facts['tokenizer']['name']} by {facts['tokenizer']['engine']}: "
        f"{_format_count(tokenizing['tokens_per_core_s'])} tokens, "
        f"{_format_bytes(tokenizing['text_bytes_per_core_s'])} a second on one core",
        "",
        "one document a row, cut or padded:                      packed rows:",
        f"{'row':>6}  {'padding':>13}  {'tokens cut':>13}  {'documents cut':>14}  {'useful':>15}  "
        f"{'useful tokens, x padded':>24}",
    ]
    for t, of in facts["sequence_lengths"].items():
        lines.append(
            f"{t:>6}  {format_percent(of['padding']):>13}  {format_percent(of['cut']):>13}  "
            f"{format_percent(of['cut_documents']):>14}  "
            f"{format_percent(of['fill_packed'], 2):>15}  {format_ratio(of['gain']):>24}"
        )
    lines += [
        "",
        f"rows of {wanted}:",
        f"{'format':<11} {'tokens':>14} {'of them useful':>16} {'on disk':>16}",
    ]
    for name, of in facts["formats"].items():
        lines.append(
            f"{name:<11} {_format_count(of['tokens']):>14} {_format_count(of['useful_tokens']):>16} "
            f"{_format_bytes(of['bytes']):>16}"
        )
    lines += ["", *_format_stalls(facts)]
    lines += ["", *textwrap.wrap(f"choose  {facts['choice']}: {facts['reason']}.", 98, subsequent_indent=" " * 8)]
    label = "next"
    for file, values in facts["configuration"].items():
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=80)
        lines += [f"{label:<6}  save as {file}:", "", *text.splitlines(), ""]
        label = "then"
    lines += [f"{label:<6}  {facts['next']}"]
    return "\n".join(lines)


def _format_stalls(facts: dict[str, Any]) -> list[str]:
    tokenizing, rate = facts["tokenizing"], facts["tokens_per_second"]
    if not rate:
        return [
            "tokenizing while training, in the training thread, takes 1 % of the step at "
            f"{_format_count(tokenizing['rate_at_stall_0.01'])} tokens/s,",
            f"10 % at {_format_count(tokenizing['rate_at_stall_0.1'])} tokens/s a rank "
            "(--tokens-per-second N computes it for your rate)",
        ]
    return [
        f"tokenizing while training at {rate:,.0f} tokens/s a rank: "
        f"{format_percent(tokenizing['core_share'], 2)} of a core,",
        f"or {format_percent(tokenizing['step_share'], 2)} of the step in the training thread",
    ]


def _format_interval(estimate: Estimate, digits: int) -> str:
    """Format an interval as lo–hi, rounded outwards so that it is never too narrow; one number if both are equal.

    >>> _format_interval(Estimate(1.5, 1.234, 1.567), 1), _format_interval(Estimate(2.0, 2.0, 2.0), 2)
    ('1.2–1.6', '2.00')
    """
    if estimate.low == estimate.high and math.isfinite(estimate.low):
        return f"{estimate.value:.{digits}f}"
    low, high = (_round_outwards(estimate.low, digits, math.floor), _round_outwards(estimate.high, digits, math.ceil))
    return low if low == high else f"{low}–{high}"


def _round_outwards(number: float, digits: int, rounding: Callable[[float], int]) -> str:
    if not math.isfinite(number):
        return "never"
    scaled = round(number * 10**digits, 6)  # 0.3 is not 0.30000000000000004
    return f"{rounding(scaled) / 10**digits:.{digits}f}"


def format_percent(estimate: Estimate, digits: int = 1) -> str:
    """Format a share in percent.

    >>> format_percent(Estimate(0.5, 0.4321, 0.5678))
    '43.2–56.8 %'
    """
    scaled = Estimate(*(100 * n for n in (estimate.value, estimate.low, estimate.high)))
    return f"{_format_interval(scaled, digits)} %"


def format_ratio(estimate: Estimate) -> str:
    """Format a ratio.

    >>> format_ratio(Estimate(1.5, 1.444, 1.555))
    '1.44–1.56x'
    """
    return f"{_format_interval(estimate, 2)}x"


def _format_scaled(estimate: Estimate, units: list[tuple[float, str]]) -> str:
    """Format an estimate with three digits, in the largest unit that its value reaches."""
    size, unit = next((u for u in units if estimate.value >= u[0]), units[-1])
    scaled = Estimate(*(n / size for n in (estimate.value, estimate.low, estimate.high)))
    digits = max(0, 2 - int(math.floor(math.log10(max(scaled.value, 1e-9))))) if size != 1 else 0
    return f"{_format_interval(scaled, min(digits, 2))} {unit}".rstrip()


def _format_count(estimate: Estimate) -> str:
    if estimate.low == estimate.high and estimate.value < 1e6:
        return f"{estimate.value:,.0f}"
    return _format_scaled(estimate, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")])


def _format_bytes(estimate: Estimate) -> str:
    return _format_scaled(estimate, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")])
