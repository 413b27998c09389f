"""Golden results: values that must not change by accident, recorded in the JSON files of this
folder.

`python -m tests.golden --write [NAME…]` records them, `make golden-test` compares. A commit that
changes one on purpose records it again and says why. Names: `run_ids`, `demo`, `layouts`,
`figures`, and `evidence` for those rebuilt from packed logs.
"""

import hashlib
import json
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenscale.base.files import pretty_json, read_json, sha256_file, sha256_text
from tokenscale_golden.reading import Curve
from tokenscale_golden.verdict import DIVERGED, judge

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
#: environment variable that makes `compare` record
WRITE = "TOKENSCALE_WRITE_GOLDEN"
#: packages whose release decides bytes of stores, tables or drawings
PACKAGES = (
    "torch",
    "numpy",
    "pyarrow",
    "tokenizers",
    "gigatoken",
    "mistral-common",
    "duckdb",
    "pandas",
    "matplotlib",
)
#: largest relative difference of losses on one processor: two units in the last place of fp32. On a
#: busy machine the sum of a step's losses came out one unit off in 3 of 384 steps of the demo, with
#: equal weights before and after
ROUNDING = 2**-22
#: the same between processors
OTHER_PROCESSOR = 1e-5


def describe_demo(results: Path) -> dict[str, Any]:
    """Return hashes of manifests and losses and order digests of all runs in a folder of
    results.
    """
    if not (results / "report/index.html").is_file():
        raise SystemExit(f"{results} has no report: first  make run")
    manifests = [*results.glob("corpus/*/manifest.json"), *results.glob("to*/**/manifest.json")]
    runs = {}
    for folder in sorted(results.glob("runs/*/attempt=00")):
        logs = [path.read_text().splitlines() for path in sorted(folder.glob("rank=*/steps.jsonl"))]
        steps = [json.loads(line) for lines in logs for line in lines]
        runs[folder.parent.name] = {
            "losses": [step["loss_sum"] for step in steps],
            "order": sha256_text(" ".join(f"{step['order_digest']}" for step in steps)),
        }
    tables = results / "tables"
    return {
        "manifests": {
            str(path.relative_to(results)): sha256_file(path) for path in sorted(manifests)
        },
        "runs": runs,
        "tables": sorted(str(path.relative_to(tables)) for path in tables.rglob("*.parquet")),
    }


def describe_rebuilt(folder: Path) -> dict[str, str]:
    """Return hashes of the tables and figures that `report rebuild` made from packed logs.

    Digests of code and tables inside a drawing are left out.
    """
    files = [path for kind in ("parquet", "csv", "svg") for path in folder.rglob(f"*.{kind}")]
    return {
        str(path.relative_to(folder)): hash_drawing(path.read_bytes()) for path in sorted(files)
    }


def hash_drawing(content: bytes) -> str:
    return hashlib.sha256(
        re.sub(rb"<metadata>.*?</metadata>", b"", content, flags=re.DOTALL)
    ).hexdigest()


def describe_machine() -> dict[str, Any]:
    """Return what decides whether bytes can be compared: packages, and the processor for losses."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "packages": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "processor": f"{model}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
    }


def compare(name: str, found: dict[str, Any], *, part: bool = False) -> None:
    """Assert that values equal the recorded ones, or record them where the environment has WRITE.

    `part`: only some of the recorded keys were computed. Ids and words are compared everywhere.
    Bytes of other releases of PACKAGES are not comparable, which skips the test. Losses may differ
    by ROUNDING, on another processor by OTHER_PROCESSOR.
    """
    path = FOLDER / f"{name.replace('/', '-')}.json"
    here = describe_machine()
    if WRITE in os.environ:
        values = read_json(path)["values"] if part and path.exists() else {}
        path.write_text(pretty_json({"machine": here, "values": values | found}))
        return
    recorded = read_json(path)
    expected = recorded["values"]
    machine = recorded["machine"]
    if name != "run_ids" and machine["packages"] != here["packages"]:
        pytest.skip(f"recorded with {machine['packages']}, here {here['packages']}")
    if part:
        expected = {key: value for key, value in expected.items() if key in found}
    tolerance = ROUNDING if machine["processor"] == here["processor"] else OTHER_PROCESSOR
    changes = list_differences(expected, found, tolerance)
    assert changes == [], f"if intended: python -m tests.golden --write {name.partition('/')[0]}"


def list_differences(old: Any, new: Any, tolerance: float, at: str = "") -> list[str]:
    """Return one line for each value that is missing, new or different.

    Losses may differ by a relative tolerance; else the line says what `tokenscale golden` says of
    them.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        lines = [f"{at}/{key}: gone" for key in old if key not in new]
        lines += [f"{at}/{key}: new" for key in new if key not in old]
        both = [key for key in old if key in new]
        return lines + [
            line for k in both for line in list_differences(old[k], new[k], tolerance, f"{at}/{k}")
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        if old and all(isinstance(value, float) for value in old + new):
            verdict = judge(Curve.of(old), Curve.of(new))
            small = verdict.kind != DIVERGED and verdict.largest <= tolerance
            return [] if small else [f"{at}: {verdict.title}: {verdict.reason}"]
        numbered = enumerate(zip(old, new, strict=True))
        return [
            line
            for i, (a, b) in numbered
            for line in list_differences(a, b, tolerance, f"{at}[{i}]")
        ]
    return [] if old == new else [f"{at}: {old} → {new}"]
