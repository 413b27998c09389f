"""The report's folder described for machines: RO-Crate 1.2, and Workflow Run Crate 0.5 where the workflow is in it.

Specifications: RO-Crate 1.2 (Soiland-Reyes et al. 2022, https://w3id.org/ro/crate/1.2), Process Run Crate, Workflow
Run Crate and Workflow RO-Crate (Leo et al. 2024, PLOS ONE 19(9)). Only what the records tell is stated: there is no
author and no licence here, for nobody has told them, and the date is that of the newest data. The profiles of runs are
named only where the crate holds what they ask for.
"""

from pathlib import Path
from typing import Any

from tokenscale.base.files import pretty_json, sha256_file

NAME = "ro-crate-metadata.json"
MAIN = "workflow/Snakefile"
ROCRATE = "https://w3id.org/ro/crate/1.2"
RUN_TERMS = "https://w3id.org/ro/terms/workflow-run/context"
PROCESS = {"https://w3id.org/ro/wfrun/process/0.5": "Process Run Crate"}
WORKFLOW = {
    "https://w3id.org/ro/wfrun/workflow/0.5": "Workflow Run Crate",
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": "Workflow RO-Crate",
}
#: ending → media type
TYPES = {
    "cff": "application/yaml",
    "csv": "text/csv",
    "html": "text/html",
    "json": "application/json",
    "md": "text/markdown",
    "parquet": "application/vnd.apache.parquet",
    "pdf": "application/pdf",
    "png": "image/png",
    "smk": "text/plain",
    "sql": "application/sql",
    "svg": "image/svg+xml",
    "tex": "application/x-tex",
}


def text(folder: Path, files: list[str], origin: dict[str, Any]) -> str:
    """The crate's metadata: `files` of the folder, and what `provenance.json` tells (`origin`)."""
    main = MAIN if MAIN in files else None
    profiles = PROCESS | (WORKFLOW if main else {})
    days = sorted(e["data_from"].split()[-1] for e in origin["experiments"].values() if e["data_from"])
    named = ", ".join(origin["experiments"])
    described = [_file(folder, name) for name in files]
    program = _workflow(described, origin) if main else {
        "@id": "#tokenscale", "@type": "SoftwareApplication", "name": "tokenscale", "softwareVersion": _version(origin)
    }  # fmt: skip
    graph = [
        {
            "@id": NAME,
            "@type": "CreativeWork",
            "about": {"@id": "./"},
            "conformsTo": _ids([ROCRATE] + [p for p in WORKFLOW if main and "workflowhub" in p]),
        },
        {
            "@id": "./",
            "@type": "Dataset",
            "name": f"tokenscale report: {named}",
            "description": "Measurements of LLM pretraining: figures, tables, the data they show, the definition of "
            "every quantity, and what it all was made from.",
            **({"datePublished": days[-1]} if days else {}),
            "conformsTo": _ids([*profiles]),
            "hasPart": _ids(files),
            "mentions": {"@id": "#report"},
            **({"mainEntity": {"@id": main}} if main else {}),
        },
        *({"@id": i, "@type": "CreativeWork", "name": n, "version": i.rpartition("/")[2]} for i, n in profiles.items()),
        program,
        {
            "@id": "#report",
            "@type": "CreateAction",
            "name": f"Report on {named}",
            "description": "Figures, tables and pages, drawn from the tables of the runs.",
            "instrument": {"@id": main or "#tokenscale"},
            "actionStatus": {"@id": "http://schema.org/CompletedActionStatus"},
            "result": _ids([n for n in files if not n.startswith("workflow/") and n != "CITATION.cff"]),
        },
        *described,
    ]
    return pretty_json({"@context": [f"{ROCRATE}/context", RUN_TERMS], "@graph": graph})


def _workflow(described: list[dict[str, Any]], origin: dict[str, Any]) -> dict[str, Any]:
    """The workflow's language; its file among those `described` is marked as the workflow, with its rules as parts."""
    rules = [entity["@id"] for entity in described if entity["@id"].startswith("workflow/rules/")]
    for entity in described:
        if entity["@id"] == MAIN:
            entity |= {
                "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow"],
                "name": "tokenscale",
                "version": _version(origin),
                "encodingFormat": "text/plain",
                "programmingLanguage": {"@id": "#snakemake"},
                "hasPart": _ids(rules),
            }
        elif entity["@id"] in rules:
            entity |= {"@type": ["File", "SoftwareSourceCode"], "version": _version(origin)}
    language = {"@id": "#snakemake", "@type": "ComputerLanguage", "name": "Snakemake"}
    version = origin["packages"].get("snakemake")
    return language | {"url": {"@id": "https://snakemake.github.io"}} | ({"version": version} if version else {})


def _version(origin: dict[str, Any]) -> str:
    """The release, and where it is known the commit."""
    commit = origin["git"].get("commit")
    changed = " with uncommitted changes" if origin["git"].get("dirty") else ""
    return origin["tokenscale"] + (f" ({commit}{changed})" if commit else "")


def _file(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    kind = TYPES.get(path.suffix[1:])
    described = {"@id": name, "@type": "File", "name": path.name, "contentSize": str(path.stat().st_size)}
    described |= {"sha256": sha256_file(path)} | ({"encodingFormat": kind} if kind else {})
    return described | ({"about": {"@id": "./"}} if name == "README.md" else {})


def _ids(names: list[str]) -> list[dict[str, str]]:
    return [{"@id": name} for name in names]
