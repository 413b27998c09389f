"""Packages of each import group: their names, their required versions, and whether Python finds them."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: import group → what it enables
GROUPS = {"host": "the workflow", "trainer": "training", "report": "the report", "test": "the tests"}


@dataclass(frozen=True)
class Package:
    """A distribution, its module, its import group, and the only feature that needs it ("": the whole group)."""

    distribution: str
    module: str
    group: str
    only: str = ""


PACKAGES = (
    Package("snakemake", "snakemake", "host"),
    Package("snakemake-executor-plugin-slurm", "snakemake_executor_plugin_slurm", "host", "SLURM"),
    Package("pydantic", "pydantic", "host"),
    Package("pyyaml", "yaml", "host"),
    Package("pygments", "pygments", "host", "snakemake --report"),
    Package("requests", "requests", "host", "downloads"),
    Package("urllib3", "urllib3", "host", "downloads"),
    Package("huggingface-hub", "huggingface_hub", "host", "downloads"),
    Package("torch", "torch", "trainer"),
    Package("numpy", "numpy", "trainer"),
    Package("pyarrow", "pyarrow", "trainer"),
    Package("safetensors", "safetensors", "trainer"),
    Package("tokenizers", "tokenizers", "trainer"),
    Package("mistral-common", "mistral_common", "trainer"),
    Package("tiktoken", "tiktoken", "trainer"),  # comes with mistral-common
    Package("gigatoken", "gigatoken", "trainer"),
    Package("xxhash", "xxhash", "trainer"),
    Package("zstandard", "zstandard", "trainer", "writing archives"),
    Package("transformers", "transformers", "trainer", "its models"),
    Package("duckdb", "duckdb", "report"),
    Package("pandas", "pandas", "report"),
    Package("matplotlib", "matplotlib", "report"),
    Package("jinja2", "jinja2", "report"),
    Package("pypdf", "pypdf", "report"),
    Package("sacrebleu", "sacrebleu", "report", "BLEU"),
    Package("pytest", "pytest", "test"),
    Package("pytest-xdist", "xdist", "test"),
    Package("markdown-it-py", "markdown_it", "test"),
    Package("hypothesis", "hypothesis", "test"),
    Package("snakefmt", "snakefmt", "test"),
    Package("ruff", "ruff", "test"),
    Package("mypy", "mypy", "test", "type checks"),
    Package("sphinx", "sphinx", "test", "the documentation site"),
    Package("myst-parser", "myst_parser", "test", "the documentation site"),
    Package("furo", "furo", "test", "the documentation site"),
    Package("latex2mathml", "latex2mathml", "test", "formulas of the documentation site"),
    Package("tensorboard", "tensorboard", "test"),
    Package("s3fs", "s3fs", "test", "sources in a bucket"),
    Package("moto", "moto", "test", "sources in a bucket"),
    Package("py-partiql-parser", "py_partiql_parser", "test", "sources in a bucket"),
    Package("flask", "flask", "test", "sources in a bucket"),
    Package("flask-cors", "flask_cors", "test", "sources in a bucket"),
    Package("datasets", "datasets", "test", "streamed datasets"),
    Package("accelerate", "accelerate", "test"),
)


def is_importable(module: str) -> bool:
    """Return whether Python finds the module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_requirements() -> dict[str, str]:
    """Return distribution → version bounds ("": none), and those of `python`. Empty if they are unknown.

    Read from the pyproject.toml of the clone that this file lies in, because metadata of an editable install may be
    older; elsewhere from the installed metadata.
    """
    try:
        text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
        try:
            import tomllib
        except ImportError:  # before Python 3.11: which Python is needed is all that can be of interest
            return {"python": _sort_bounds(re.search(r'^requires-python = "(.+)"$', text, re.MULTILINE)[1])}
        project = tomllib.loads(text)["project"]
        python, extras = project["requires-python"], project["optional-dependencies"].values()
        stated = [*project["dependencies"], *(r for extra in extras for r in extra)]
    except (OSError, ValueError, KeyError, TypeError):
        try:
            stated = importlib.metadata.requires("tokenscale") or []
            python = importlib.metadata.metadata("tokenscale")["Requires-Python"] or ""
        except importlib.metadata.PackageNotFoundError:
            return {}
    found = {"python": _sort_bounds(python)}
    for requirement in stated:
        name, bounds = re.match(r"([\w.-]+)(?:\[.*?\])?\s*\(?([^;)]*)", requirement).groups()
        found[name.lower().replace("_", "-")] = _sort_bounds(bounds)
    return found


def _sort_bounds(bounds: str) -> str:
    return ",".join(sorted(bounds.replace(" ", "").split(","), reverse=True))  # the lower bound first


def satisfies(version: str, bounds: str) -> bool:
    """Return whether a version lies within bounds such as `>=2.9,<2.14`.

    Only the numbers count: a container's `2.9.0a0+5228986` is taken for 2.9.0, which pip would not do.

    >>> satisfies("2.13.0+cpu", ">=2.9,<2.14"), satisfies("2.8.1", ">=2.9,<2.14"), satisfies("2.14.0rc1", "<2.14")
    (True, False, False)
    """
    for bound in filter(None, bounds.replace(" ", "").split(",")):
        operator, limit = re.fullmatch(r"(>=|<=|==|!=|~=|>|<)(.+)", bound).groups()
        have, want = _parse_version(version), _parse_version(limit)
        length = max(len(have), len(want))
        a, b = have + (0,) * (length - len(have)), want + (0,) * (length - len(want))
        holds = {
            ">=": a >= b,
            "<=": a <= b,
            ">": a > b,
            "<": a < b,
            "!=": a != b,
            "==": a == b,
            "~=": a >= b and a[: len(want) - 1] == b[: len(want) - 1],
        }
        if not holds[operator]:
            return False
    return True


def _parse_version(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def describe_problems(states: dict[str, dict[str, Any]]) -> str:
    """Describe what is wrong with packages: missing ones together, each other one by its own text.

    >>> old = {"state": "outside", "only": "", "text": "b 1 is outside >2"}
    >>> describe_problems({"a": {"state": "missing", "only": "SLURM"}, "b": old})
    'missing: a (only for SLURM); b 1 is outside >2'
    """
    missing, others = [], []
    for name, state in states.items():
        only = f" (only for {state['only']})" if state["only"] else ""
        if state["state"] == "missing":
            missing.append(name + only)
        elif state["state"] != "ok":
            others.append(state["text"] + only)
    return "; ".join([f"missing: {', '.join(missing)}"] * bool(missing) + others)
