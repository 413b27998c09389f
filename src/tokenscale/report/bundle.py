"""The report's folder: beside page and PDF the figures, data, queries and tables, what they come
from, and checksums.

Nothing in it is written in place, and what no longer belongs to the report is removed. Equal tables
and code give equal bytes, but for what `provenance.json` and the README tell of the commit.
`verify` makes all of it again from the logs.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from tokenscale import __version__
from tokenscale.analysis.queries import PARAMETERS, connect, damage_reported, sql
from tokenscale.base.errors import UserError
from tokenscale.base.facts import clear_unknown
from tokenscale.base.files import atomic, canonical_json, read_file, sha256_file, write_text
from tokenscale.base.manifests import SUMS
from tokenscale.report import save
from tokenscale.report.packed_logs import LOGS, pack
from tokenscale.report.summary import TABLES
from tokenscale.report.table import Table, latex, markdown
from tokenscale.runs.records import provenance
from tokenscale.settings.closure import hash_closure
from tokenscale.settings.registry import FIGURES

#: read here, in this order
QUERIES = ("inventory", "throughput", "validation", "stalls", "memory", "epochs", "computing")
#: query → its column → the measure's name, unit in the name
MEASURES = {
    "throughput": {"useful_tokens_per_s": "useful_tokens_per_s"},
    "validation": {"loss": "validation_loss"},
    "stalls": {"data_stall_share": "data_stall_share"},
    "memory": {"peak_bytes": "memory_peak_bytes"},
    "epochs": {"epoch_s": "epoch_s"},
    "computing": {"mfu_palm": "mfu"},
}
#: measures of which less is better
LESS_IS_BETTER = {"validation_loss", "data_stall_share", "memory_peak_bytes", "epoch_s"}
NAMES = [name for measures in MEASURES.values() for name in measures.values()]
IDENTITY = ("run_id", "cell", "series", "world_size", "repeat", "external", "validity", "seal")


def measured_runs(rows: Callable[[str], pd.DataFrame]) -> pd.DataFrame:
    """Rows of all runs that an experiment lists: `IDENTITY` and `NAMES`, null where unknown. `rows`
    gives a query's.

    `validation_loss` is that of the last step, in nats a useful token; `mfu` follows PaLM (see
    `computing.sql`).
    """
    found = rows("inventory")[list(IDENTITY)]
    for name, columns in MEASURES.items():
        measured = rows(name)
        if name == "validation":
            measured = measured[measured["last"].astype(bool)]
        measured = measured[["run_id", *columns]].rename(columns=columns)
        found = found.merge(
            measured.drop_duplicates("run_id", keep="last"), on="run_id", how="left"
        )
    return found.astype(dict.fromkeys(NAMES, "float64"))


#: read by name
FILES = ("bundle.md",)
README = "README.md"
#: packages that made the folder
PACKAGES = (
    "duckdb",
    "fonttools",
    "jinja2",
    "matplotlib",
    "numpy",
    "pandas",
    "pillow",
    "pyarrow",
    "pypdf",
    "snakemake",
)
#: folders that hold nothing but what this module writes
FOLDERS = ("figures", "data", "sql", "tables", "workflow")
#: column of the table `runs` → its name in `provenance.json`
_OF_RUN = {
    **{
        n: n
        for n in (
            "seal",
            "validity",
            "code_digest",
            "machine",
            "device",
            "cpu",
            "cores",
            "corpus",
            "tokenizer",
            "science",
        )
    },
    "git_commit": "commit",
    "git_dirty": "dirty",
    "threads_per_rank": "threads",
    "load_average": "load",
    "validation_tokens": "held_out_tokens",
}
_MANIFESTS = ("corpus", "tokenizer", "store", "validation_store")
#: files that are copied; all others follow from the packed logs
COPIED = ("workflow/", "CITATION.cff", "claims.yaml", LOGS)
#: packages of which another release may draw the same data in other bytes
DRAWING = ("fonttools", "jinja2", "matplotlib", "numpy", "pillow", "pyarrow", "pypdf", "zlib")
#: packages that verify a report: far fewer than trainings need
VERIFYING = (*DRAWING[:-1], "duckdb", "pandas", "pydantic", "pyyaml", "xxhash")


def write(
    parts: Sequence[dict[str, Any]],
    tables: Path,
    figures: Path,
    output: Path,
    *,
    workflow: Path | None = None,
    citation: Path | None = None,
    ledger: Path | None = None,
    also: tuple[Path, ...] = (),
    logs: bool = True,
    built: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Fill the folder `output`, in which `index.html` and `report.pdf` lie already; return its
    `provenance.json`.

    `workflow` (the Snakefile, with its rules), `citation` and `ledger` (the claims) are copied
    where they exist; `also` are further files of the folder. Without `logs` the folder does not
    prove itself, and its README says why. `built` is what `built_by` told of a report that is made
    again. Raises UserError where a file is missing.
    """
    files = {path: read_file(output / path) for path in _list_foreign_files(output, also)}
    files |= {f"sql/{name}.sql": sql(name).encode() for name in PARAMETERS}
    for part in parts:
        name = part["name"]
        files |= _collect_files(part, figures=figures / name)
        with save.Tables(tables / name) as opened:
            rows = measured_runs(opened.rows)
        files |= {
            f"data/{name}/cells.csv": save.csv(rows).encode(),
            f"data/{name}/cells.parquet": save.parquet(rows),
        }
    copied = {"CITATION.cff": citation, "claims.yaml": ledger}
    if workflow is not None and workflow.is_file():
        rules = workflow.parent.glob("rules/*.smk")
        copied |= {
            f"workflow/{path.relative_to(workflow.parent).as_posix()}": path
            for path in (workflow, *rules)
        }
    files |= {
        name: read_file(path)
        for name, path in copied.items()
        if path is not None and path.is_file()
    }
    of = {
        part["name"]: {
            "tables": part["digest"],
            "data_from": part["data_from"],
            "runs": runs(tables / part["name"]),
        }
        for part in parts
    }
    record = {"schema": 1, **(built or built_by()), "order": list(of), "experiments": of}
    record |= {
        "logs": _pack(
            list(of),
            tables,
            output=output / LOGS,
            wanted=logs,
        )
    }
    if "runs" in record["logs"]:
        files[LOGS] = read_file(output / LOGS)
    files[README] = render_readme(record, cited="CITATION.cff" in files).encode()
    files["provenance.json"] = (canonical_json(record) + "\n").encode()
    _settle(output, files)
    sums = {name: sha256_file(output / name) for name in sorted(files)}
    write_text(output / SUMS, text="".join(f"{sha256}  {name}\n" for name, sha256 in sums.items()))
    return record


def _pack(experiments: list[str], tables: Path, output: Path, wanted: bool) -> dict[str, Any]:
    """Pack the logs beside the report; return the number of runs in them, or why there are none."""
    try:
        if wanted:
            return {"runs": pack(experiments, folder=tables, output=output)}
        reason = "left out by a setting (report_logs)"
    except UserError as error:  # the report is as right without them
        path = Path(error.facts.get("path", tables.parent))
        where = path.relative_to(tables.parent) if path.is_relative_to(tables.parent) else path.name
        reason = f"{error.what.rstrip('.')} ({where})"
    return {"left_out": reason}


def built_by() -> dict[str, Any]:
    """What builds a report now: version, commit, main packages, all that are installed, source file
    → SHA-256.
    """
    git, _ = provenance.read_git_state()
    roots = (
        "tokenscale.report.bundle",
        "tokenscale.report.page",
        "tokenscale.report.pdf",
        "tokenscale.report.save",
    )
    return {
        "tokenscale": __version__,
        "git": {key: git[key] for key in ("commit", "dirty") if key in git},
        "packages": provenance.find_versions(PACKAGES),
        "zlib": zlib.ZLIB_RUNTIME_VERSION,  # compresses PNG and PDF
        "installed": provenance.list_installed(),
        "code": hash_closure(*roots, *FIGURES.values()),
    }


def runs(tables: Path) -> dict[str, dict[str, Any]]:
    """Return run id → facts on its origin in its record, without missing ones."""
    with connect(tables) as connection, damage_reported(connection):
        rows = connection.execute(
            "SELECT * FROM runs WHERE status <> 'missing' ORDER BY run_id"
        ).df()
    found = {}
    for row in rows.astype(object).where(rows.notna(), None).to_dict("records"):
        known = {name: row[column] for column, name in _OF_RUN.items() if row[column] is not None}
        manifests = {
            kind: row[f"{kind}_sha256"] for kind in _MANIFESTS if row[f"{kind}_sha256"] is not None
        }
        packages = json.loads(row["versions"] or "{}")
        found[row["run_id"]] = known | {"manifests": manifests, "packages": packages}
    return found


def _list_foreign_files(output: Path, also: tuple[Path, ...]) -> Iterator[str]:
    """Names of the files of the folder that others have made."""
    for path in (output / "index.html", output / "report.pdf", *also):
        if not path.is_file():
            next_step = "snakemake report, or tokenscale report"
            raise UserError("a file of the report is missing.", file=path, next=next_step)
        if not path.resolve().is_relative_to(output.resolve()):
            what = "a file of the report lies outside its folder."
            next_step = "write it below the folder of the report"
            raise UserError(what, file=path, folder=output, next=next_step)
        yield path.resolve().relative_to(output.resolve()).as_posix()


def _collect_files(part: dict[str, Any], figures: Path) -> dict[str, bytes]:
    """Return drawings and data of an experiment's figures, and every table that the page shows, as
    Markdown and LaTeX. Raises UserError for a figure that is missing or changed.
    """
    name = part["name"]
    files = {}
    tables = {key: part[key] for key in TABLES}
    tables |= {
        f"same-data-{p['kind'].replace(' ', '-')}": p["table"] for p in part["proof"]["parts"]
    }
    for figure in part["figures"]:
        words, contents = save.read_figure(figures / f"{figure}.json")
        for kind, content in contents.items():
            folder = "figures" if kind in save.DRAWN else "data"
            files[f"{folder}/{name}/{figure}.{kind}"] = content
        if "table" in words:
            tables[figure] = Table(**words["table"])
    for key, table in tables.items():
        files[f"tables/{name}/{key}.md"] = markdown(table).encode()
        files[f"tables/{name}/{key}.tex"] = latex(table, label=f"tab:{name}-{key}").encode()
    return files


def render_readme(record: dict[str, Any], cited: bool) -> str:
    """Return the README of a report with this record of its origin; `cited`: whether the folder has
    a CITATION.cff.
    """
    text = resources.files("tokenscale.report").joinpath("bundle.md").read_text(encoding="utf-8")
    commit = clear_unknown(record["git"].get("commit"))
    logs = record["logs"]
    installed = record["installed"]
    changed = " with uncommitted changes" if record["git"].get("dirty") else ""
    proof = f"`{LOGS}` has the logs of {logs.get('runs', 0):,} runs"
    if "left_out" in logs:
        proof = (
            f"The logs are not in this folder: {logs['left_out']}. `verify` can then only "
            "compare checksums"
        )
    return text.format(
        experiments="\n".join(f"- `{name}`" for name in record["order"]),
        cite="`CITATION.cff` says how to cite the software"
        if cited
        else "Cite tokenscale by its name",
        version=record["tokenscale"],
        commit=f"commit {commit}{changed}" if commit else "no commit recorded",
        checkout=f"git checkout {commit} && " if commit else "",
        packages=" ".join(f"{name}=={installed[name]}" for name in VERIFYING if name in installed),
        proof=proof,
    )


def _settle(output: Path, files: dict[str, bytes]) -> None:
    """Write what has changed, each file at once, and remove what is no longer part of the
    report.
    """
    for name, content in files.items():
        path = output / name
        if not path.is_file() or read_file(path) != content:
            with atomic(path) as temporary:
                temporary.write_bytes(content)
    for name in ("CITATION.cff", "claims.yaml", LOGS):
        if name not in files:
            (output / name).unlink(missing_ok=True)
    for folder in (output / name for name in FOLDERS):
        for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
            if path.is_file() and path.relative_to(output).as_posix() not in files:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
