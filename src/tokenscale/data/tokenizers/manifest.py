"""Manifest of a tokenizer, `results/tokenizers/<name>/manifest.json`, read without any tokenizer package."""

from pathlib import Path
from typing import Any

from tokenscale.base.files import check_file_name, check_types, read_manifest_file, report_malformed

VERSION = 2
#: required fields of a manifest and their types
FIELDS = {
    **{"name": str, "kind": str, "file": dict, "vocabulary_size": int},
    **{"bos_id": int, "eos_id": (int, type(None)), "pad_id": int},
}


def rebuild_command(directory: Path) -> str:
    return f"snakemake -f {Path(directory) / 'manifest.json'}"


def read_tokenizer_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a tokenizer. Raises UserError if it is missing, malformed, or of an unsupported version."""
    path = Path(directory) / "manifest.json"
    manifest = read_manifest_file(path, "tokenizer", VERSION, rebuild_command(directory), oldest=2)
    with report_malformed(path, "manifest of the tokenizer", rebuild_command(directory)):
        check_types(manifest, FIELDS)
        for file in [manifest["file"], *manifest.get("derived", [])]:
            check_types(file, {"name": str, "sha256": str})
            check_file_name(file["name"])
        ids = [manifest["bos_id"], manifest["pad_id"], manifest["eos_id"] or 0]
        if not all(0 <= found < manifest["vocabulary_size"] for found in ids):
            raise ValueError(f"control ids {ids} of {manifest['vocabulary_size']}")
    return manifest
