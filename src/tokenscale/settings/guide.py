"""docs/experiment-list.md, generated from the experiments' files: question, design, source studies, command."""

from collections.abc import Mapping
from pathlib import Path

from tokenscale.base.files import canonical_json, write_text
from tokenscale.settings.config import Config
from tokenscale.settings.experiments import (
    STUDIES,
    Experiment,
    SourceStudy,
    describe_primary,
    describe_repeats,
    flatten_cell,
)

HEAD = """# Experiments

One file, one question. Written from the files themselves by `python -m tokenscale check --write`; edit those.

`snakemake NAME` runs one with its figures, `snakemake all_experiments` all of them with one report,
`python -m tokenscale plan [NAME …]` says what that takes. Scales are overlays of one file, chosen by
`--config scale=workstation`: `demo` is a CPU's, of minutes, and says nothing about GPUs; `workstation` and `alps` are
for GPUs; `study` has the source studies' own cells. At a scale without an overlay an experiment is left out of
`all_experiments`, and refused by its name.

"""


def render_guide(configs: Mapping[str, Config]) -> str:
    """Return the whole file. `configs` are scale → the same configuration at that scale."""
    first = next(iter(configs.values()))
    parts = [HEAD, *(_render_experiment(name, configs) for name in first.available), _render_studies()]
    return "\n".join(parts)


def _render_experiment(name: str, configs: Mapping[str, Config]) -> str:
    lines = [f"## {name}", "", _first_experiment(configs, name).question.strip(), ""]
    if note := _first_experiment(configs, name).note.strip():
        lines += [note, ""]
    lines += ["| scale | runs | repeats | world sizes | factors |", "|---|---|---|---|---|"]
    for scale, config in configs.items():
        if not config.has_scale(name):
            lines.append(f"| {scale} | not run at this scale | | | |")
            continue
        experiment, runs = config.experiment(name), config.runs(name)
        sizes = sorted({run.settings.layout.world_size for run in runs})
        factors = "; ".join(f"{factor}: {_format_levels(levels)}" for factor, levels in experiment.factors.items())
        row = [scale, str(len(runs)), describe_repeats(experiment), ", ".join(map(str, sizes)), factors or "none"]
        lines.append(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |")
    lines += [
        "",
        *_render_primary(configs, name),
        *_render_source_study(_first_experiment(configs, name).original),
        "```sh",
        f"snakemake --cores 2 {name}",
        "```",
        "",
    ]
    return "\n".join(lines)


def _render_primary(configs: Mapping[str, Config], name: str) -> list[str]:
    """Return a line for each scale with its primary comparisons; scales with equal ones share a line."""
    scales: dict[str, list[str]] = {}
    for scale, config in configs.items():
        for comparison in describe_primary(config.experiment(name)) or () if config.has_scale(name) else ():
            of, over = comparison["names"]
            at = f" at {comparison['at']}" if comparison["at"] else ""
            text = f"{of} against {over}{at} ({comparison['quantity'].replace('_', ' ')})"
            scales.setdefault(text, []).append(scale)
    return [line for text, at in scales.items() for line in (f"*Primary comparison, {', '.join(at)}:* {text}", "")]


def _first_experiment(configs: Mapping[str, Config], name: str) -> Experiment:
    return next(iter(configs.values())).experiment(name)


def _format_levels(levels: list) -> str:
    """Format levels for a table cell: settings of a mapping, and values that vary together, separated by blanks.

    >>> _format_levels(["packed", {"data": 2, "tensor": 2}, [2, 16]])
    'packed, data=2 tensor=2, 2 16'
    """
    return ", ".join(_format_level(level) for level in levels)


def _format_level(level: object) -> str:
    if isinstance(level, dict):
        return " ".join(f"{key}={_format_level(value)}" for key, value in flatten_cell(level).items())
    if isinstance(level, list):
        return " ".join(map(_format_level, level))
    return level if isinstance(level, str) else canonical_json(level)


def _render_source_study(original: SourceStudy) -> list[str]:
    texts = {
        "Studies": ", ".join(original.studies),
        "The original measured": original.measured.strip(),
        "What was wrong with it": original.wrong.strip(),
        "What ours measures, and why the numbers differ": original.ours.strip(),
    }
    return [line for heading, text in texts.items() if text for line in (f"*{heading}:* {text}", "")]


def _render_studies() -> str:
    rows = [f"| {number} | {title} |" for number, title in STUDIES.items()]
    return "\n".join(["## The studies", "", "| number | study |", "|---|---|", *rows, ""])


def update(path: Path, configs: Mapping[str, Config]) -> None:
    """Write the file."""
    write_text(path, render_guide(configs))
