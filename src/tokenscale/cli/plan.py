"""List the runs of experiments with their memory, hours and files; with --output, write a run
table.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenscale.base.errors import UserError, as_typed
from tokenscale.base.files import write_sealed
from tokenscale.base.wording import format_bytes, format_number
from tokenscale.cli import main
from tokenscale.cli.check import check_sources
from tokenscale.cli.plan_memory import measure_memory, render_memory
from tokenscale.cli.plan_prices import GpuPrice, RunPrices, read_gpu_prices
from tokenscale.costs.card import TextCard, choose_samples, count_dropped
from tokenscale.costs.peaks import peak_flops
from tokenscale.costs.prices import STARTING_S, UTILISATION, Total, sum_prices
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.stores.lengths import find_lengths
from tokenscale.runs.launch.submission import format_hours, suggest_budget
from tokenscale.settings.config import ALL, Config
from tokenscale.settings.data import state_cleaning
from tokenscale.settings.experiments import describe_repeats
from tokenscale.settings.layout import geometry
from tokenscale.settings.machine import Machine
from tokenscale.settings.manifests import corpus_manifest
from tokenscale.settings.profile import CONFIG_FILE
from tokenscale.settings.run import READERS, RunSettings, start_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "names of experiments, or all_experiments; by default those of the report"
    parser.add_argument("experiment", nargs="*", help=names)
    parser.add_argument(
        "--config-json", type=json.loads, help="configuration as JSON, instead of the file"
    )
    main.add_configuration_arguments(parser)
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help="also price rented GPUs, as in config/prices.yaml",
    )
    parser.add_argument("--output", type=Path, help="write the run table of one experiment as JSON")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="instead of the plan: run one step of each cell without devices, and print its bytes",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or write the run table of one experiment."""
    if arguments.config_json is not None:
        config = Config({**arguments.config_json, **main.read_overrides(arguments)})
    else:
        config = main.load_configuration(arguments)
    names = config.select_experiments(arguments.experiment)
    if arguments.output:
        if len(names) != 1:
            raise UserError(
                "--output takes one experiment.", found=", ".join(names), next="name one experiment"
            )
        write_sealed(arguments.output, record=config.table(names[0]))
        return 0
    if arguments.measure:
        runs = [run.settings for run in config.all_runs(names).values()]
        for line in measure_memory(runs):
            print(line, flush=True)
        return 0
    gpus = read_gpu_prices(arguments.prices) if arguments.prices is not None else {}
    print(*plan(config, names), *render_rent(config, names, gpus=gpus), sep="\n")
    return 0


def plan(config: Config, names: list[str]) -> Iterator[str]:
    """Yield each experiment with its world sizes and its memory, then the cost of all of them."""
    prices = RunPrices(config)
    yield f"scale {config.settings.scale}"
    if names == config.select_experiments([ALL]) and (note := config.left_out_note):
        yield note
    for problem in check_sources(config, names):
        yield f"missing: {problem.what} ({problem.key}). Next: {as_typed(problem.next)}"
    for name in config.list_corpora(names):
        if config.corpora[name].source.downloaded is False:
            yield (
                f"corpus {name}: not downloaded yet with this configuration, so its hashes are "
                "not known"
            )
        yield from state_cleaning(prices.read_manifest("corpus", name) or {})
        yield from _render_text(config, names, corpus=name)
    for name in names:
        yield from _render_experiment(config, name)
    shared = sum(len(config.runs(n)) for n in names) - len(config.all_runs(names))
    if shared:
        yield f"{shared} run(s) are shared between experiments and run once"
    yield ""
    yield from render_prices(config, names, prices=prices)


def _render_text(config: Config, names: list[str], corpus: str) -> Iterator[str]:
    """Yield the card of a corpus that is built; with lengths for each tokenizer that has a store."""
    folder = Path(corpus_manifest(corpus)).parent
    try:
        text = RawText(folder, verify=False)
        samples = [
            str(column[0])
            for place in choose_samples(len(text))
            for column in text.columns(1, place, place + 1)
        ]
    except UserError:
        return  # not built, or not as it was
    dropped = count_dropped(text.manifest)
    size = text.split["utf8_bytes"]
    yield f"text {corpus}: {len(text):,} documents, {format_bytes(size)}"
    yield from (
        f"  {line}"
        for line in TextCard(
            len(text), text_bytes=size, dropped=dropped, samples=samples
        ).describe()
    )
    runs = [run.settings for run in config.all_runs(names).values()]
    read = {
        (run.tokenizer.name, run.eos, run.sequence_length): None
        for run in runs
        if corpus in {each.name for each in run.trained_corpora}
    }
    shown = set()
    for tokenizer, eos, sequence_length in read:
        lengths = find_lengths(Path("results/tokens", corpus, tokenizer), eos)
        if lengths is None:
            continue
        card = TextCard(len(text), text_bytes=size, lengths=lengths)
        if (tokenizer, eos) not in shown:
            shown.add((tokenizer, eos))
            yield from (f"  {tokenizer}: {line}" for line in card.describe())
        yield f"  {tokenizer}: {card.describe_rows(sequence_length)}"


def _render_experiment(config: Config, name: str) -> Iterator[str]:
    """Yield an experiment's question, a line for each of its world sizes, and its memory."""
    runs = config.runs(name)
    experiment = config.experiment(name)
    yield (
        f"{name}: {len(runs)} runs (repeats: {describe_repeats(experiment)}). {experiment.question}"
    )
    for size in sorted({run.settings.layout.world_size for run in runs}):
        of_size = [run.settings for run in runs if run.settings.layout.world_size == size]
        yield _render_world_size(config, size, runs=of_size)
    if experiment.inference_benchmark is not None:
        yield f"  {experiment.inference_benchmark.describe(len(runs))}"
    trained = [run.settings for run in runs if run.settings.arm not in READERS]
    if trained:
        yield from render_memory(trained, gpu_gib=config.machine.gpu_memory_gib)


def _render_world_size(config: Config, size: int, runs: list[RunSettings]) -> str:
    """Return a line with the nodes, steps and tokens of the runs of one world size."""
    shape = geometry(size, gpus_per_node=config.machine.gpus_per_node)
    # without the steps of a run that it resumes
    own = [(max(0, r.budget.steps - start_step(r)), r) for r in runs if r.budget.kind == "steps"]
    tokens = sum(steps * run.global_batch * run.sequence_length for steps, run in own)
    line = (
        f"  world size {size:>2}: {len(runs):>4} runs on {shape.nodes} x "
        f"{shape.ranks_per_node} ranks"
    )
    line += f", {sum(steps for steps, _ in own):,} steps, {tokens:,} tokens"
    if len(own) < len(runs):
        line += f", and {len(runs) - len(own)} whose budget is not in steps"
    return line


def render_prices(config: Config, names: list[str], prices: RunPrices) -> Iterator[str]:
    """Yield a table of runs, hours, files and bytes, one line per experiment, then its assumptions
    and the budget.
    """
    machine = config.machine
    every = config.all_runs(names)
    of_all = sum_prices(prices.price(run) for run in every.values())
    yield f"cost on {machine.name}" + (
        f" ({machine.gpus_per_node} GPUs a node)" if machine.gpus_per_node else ""
    )
    left = [run_id for run_id in every if not prices.is_done(run_id)]
    hours = "GPU-hours" if machine.gpus_per_node or machine.device else "rank-hours"
    rows: list[tuple[str, ...]] = [
        ("", "runs", "done", "node-hours", hours, "files", "bytes"),
    ]
    for name in names:
        runs = config.runs(name)
        ended = sum(prices.is_done(run.run_id) for run in runs)
        rows.append(_format_row(name, done=ended, of=sum_prices(prices.price(run) for run in runs)))
    if len(names) > 1:
        rows.append(_format_row("total", done=len(every) - len(left), of=of_all))
    yield from _render_table(rows)
    charged = "from start to end of a run, times its nodes (whole ones are charged)"
    yield f"  node-hours: {charged}; {hours}: times its ranks"
    if sharing := sum(run.count_places(machine) > 1 for run in every.values()):
        yield f"  {sharing} of these runs share nodes, each charged once (share_nodes)"
    yield "  files, bytes: what the runs leave in results/runs; done: runs that have ended"
    yield from _describe_stores(config, names, prices=prices)
    if of_all.passing_bytes:
        yield (
            f"  resume states: up to {format_bytes(of_all.passing_bytes)} more while a run is "
            "running"
        )
    if of_all.unlogged:
        yield (
            f"  logs of {of_all.unlogged} runs are not counted in these bytes: their number of "
            "steps is not known"
        )
    yield from _describe_unknown_hours(config, names, of_all=of_all)
    if of_all.timed:
        yield from _describe_assumptions(config, runs=every.values(), of_all=of_all)
        yield from _describe_budget(config, prices, left=left)


def _describe_unknown_hours(config: Config, names: list[str], of_all: Total) -> Iterator[str]:
    """Yield why hours are bounds or not known, and the commands that measure or predict them."""
    for why, count in of_all.bounded.items():
        yield f"  ≤: {count} of {of_all.runs} runs are priced by {why}"
    for why, count in of_all.unknown.items():
        yield f"  hours of {count} of {of_all.runs} runs are not known: {why}"
    if not of_all.unknown:
        return
    chosen = "" if names == config.select_experiments(()) else f" {' '.join(names)}"
    scale = ""
    if config.file_of("scale") != CONFIG_FILE:
        scale = f" --config scale={config.settings.scale}"
    yield as_typed(
        f"    next  snakemake{chosen}{scale}   # hours are then those of the first run of each cell"
    )
    if any("no device" in why for why in of_all.unknown):
        yield """          or, for a GPU: echo 'device = "NVIDIA H100 80GB HBM3"' > machine.toml"""
        yield as_typed(f"          tokenscale plan{chosen} --machine machine.toml{scale}")


def render_rent(config: Config, names: list[str], gpus: dict[str, GpuPrice]) -> Iterator[str]:
    """Yield a table of GPU-hours and US dollars, one line for each GPU of a price file. Each rank
    rents one GPU.
    """
    if not gpus:
        return
    yield "rent, if each rank rents one GPU"
    rows = [("", "GPU-hours", "USD per GPU-hour", "USD")]
    unknown: dict[str, None] = {}
    for name, price in gpus.items():
        prices = RunPrices(config, machine=Machine(name=name, device=name))
        of_all = sum_prices(prices.price(run) for run in config.all_runs(names).values())
        for why, number in of_all.unknown.items():
            unknown[f"  hours of {number} runs on {name} are not known: {why}"] = None
        hours = _format_row(name, done=0, of=of_all)[4]
        if price.usd_per_gpu_hour is None:
            rows.append((name, hours, "not set", ""))
            continue
        cost = hours if not of_all.timed else f"{of_all.gpu_hours * price.usd_per_gpu_hour:,.2f}"
        rate = f"{price.usd_per_gpu_hour:,.2f}"
        origin = ", ".join(filter(None, [price.source, str(price.date or "")]))
        if origin:
            rate += f" ({origin})"
        rows.append((name, hours, rate, cost))
    yield from _render_table(rows)
    yield from unknown


def _render_table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows whose columns end below each other; the first one begins there."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *others in rows:
        yield f"  {'  '.join([name.ljust(first), *map(str.rjust, others, widths)])}".rstrip()


def _format_row(name: str, done: int, of: Total) -> tuple[str, ...]:
    hours = (
        ["not known"] * 2
        if of.runs and not of.timed
        else map(format_number, (of.node_hours, of.gpu_hours))
    )
    # hours of a part of the runs are at least what all of them take, unless there are upper bounds
    # among them
    missing = 0 < of.timed < of.runs
    if missing and of.bounded:
        sign = "about "
    elif of.bounded:
        sign = "≤ "
    elif missing:
        sign = "≥ "
    else:
        sign = ""
    return (
        name,
        f"{of.runs:,}",
        f"{done:,}",
        *(sign + text for text in hours),
        f"{of.files:,}",
        format_bytes(of.bytes),
    )


def _describe_stores(config: Config, names: list[str], prices: RunPrices) -> Iterator[str]:
    """Yield a line on the token stores that the runs read."""
    stores = prices.count_stores(names)
    pieces = []
    if stores.existing:
        size = format_bytes(stores.existing_bytes)
        pieces.append(f"{stores.existing} here with {stores.existing_files:,} files, {size}")
    if stores.predicted:
        pieces.append(
            f"{stores.predicted} to be made, about {format_bytes(stores.predicted_bytes)} before "
            "compression"
        )
    if stores.unknown:
        texts = sorted({name.rpartition("/")[0] for name in stores.unknown})
        pieces.append(f"{len(stores.unknown)} to be made, of unknown size ({', '.join(texts)})")
    if pieces:
        yield f"  token stores, in addition: {'; '.join(pieces)}"


def _describe_assumptions(config: Config, runs: Iterable, of_all: Total) -> Iterator[str]:
    machine = config.machine
    if of_all.measured:
        yield (
            f"  measured: hours of {of_all.measured:,} of {of_all.runs:,} runs, by runs of their "
            "cell that ended here"
        )
    peaks: dict[str, float] = {}
    for number in sorted({run.settings.number_format for run in runs}):
        if machine.device and (peak := peak_flops(machine.device, number)):
            peaks[number] = peak
    if peaks and of_all.measured < of_all.timed:
        pieces = ", ".join(
            f"{peak / 1e12:,.0f} TFLOP/s in {number}" for number, peak in peaks.items()
        )
        start = f"{STARTING_S:.0f} s until a job's first step, then {UTILISATION:.0%}"
        yield f"  estimated, not measured: {start} of the peak of {machine.device} ({pieces})"
    if machine.gpus_per_node:
        share = of_all.gpu_hours / (of_all.node_hours * machine.gpus_per_node)
        yield f"  whole nodes are charged: {share:.0%} of their GPUs compute"


def _describe_budget(config: Config, prices: RunPrices, left: list[str]) -> Iterator[str]:
    """Yield whether the remaining runs fit the budget of node-hours; nothing for a machine without
    `gpus_per_node`.
    """
    if config.machine.gpus_per_node is None:
        return
    totals = prices.sum_by_experiment(left)
    needed = sum(of.node_hours for of in totals.values())
    allowed = config.settings.budget.node_hours
    kept = needed <= allowed
    pieces = f"{'within' if kept else 'over'} the budget of {allowed:,g} (budget.node_hours)"
    if unknown := sum(sum(of.unknown.values()) for of in totals.values()):
        pieces += f"; {unknown:,} of unknown hours {'is' if unknown == 1 else 'are'} not counted"
    yield f"  {len(left):,} runs are left to do, {format_hours(totals)} node-hours: {pieces}"
    if not kept:
        yield "  submission will be refused. Raise the budget with"
        yield f"    --config '{suggest_budget(needed)}'"
