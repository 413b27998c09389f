"""Checks of the project's folder and of its configuration."""

from pathlib import Path

from tokenscale.cli.doctor_finding import Asked, Finding
from tokenscale.cli.packages import importable


def folder(asked: Asked) -> Finding:
    """Whether this folder is the project's: the workflow lies in the repository, not in the package."""
    needed = ("workflow/Snakefile", "config/config.yaml", "profiles/local/config.yaml", "pyproject.toml")
    missing = [name for name in needed if not Path(name).is_file()]
    if missing:
        return Finding("no", f"not in this folder: {', '.join(missing)}", "cd to the clone of the repository")
    if not Path("alps/config.yaml").is_file():  # a download without links, or a file system without them
        return Finding("note", "the link `alps` does not lead to profiles/alps", "ln -sfn profiles/alps alps")
    return Finding("ok", "workflow, configuration and profiles are here")


def configuration(asked: Asked) -> Finding:
    """What the configuration asks for, as the workflow would read it."""
    if not importable("pydantic") or not importable("yaml"):
        return Finding("no", "not known without pydantic and pyyaml", "see host packages", {"without": "pydantic"})
    if not Path("config/config.yaml").is_file():
        return Finding("no", "not known outside of the project's folder", "see project", {"without": "project"})
    from tokenscale.base.errors import UserError
    from tokenscale.settings.config import load

    try:
        config = load("config/config.yaml")
        runs = config.all_runs(list(config.settings.experiments))
    except UserError as error:
        facts = ", ".join(f"{label} {text}" for label, text in error.facts.items() if label != "next")
        return Finding("no", f"{error.what} {facts}", error.facts.get("next", "python -m tokenscale check"))
    most = max((run.settings.layout.world_size for run in runs.values()), default=1)
    on_gpus = max((r.settings.layout.world_size for r in runs.values() if r.settings.device == "auto"), default=0)
    names = ", ".join(config.settings.experiments)
    return Finding(
        "ok",
        f"scale {config.settings.scale}, experiments {names}: {len(runs)} runs of at most {most} ranks",
        values={"scale": config.settings.scale, "runs": len(runs), "ranks": most, "gpu_ranks": on_gpus},
    )
