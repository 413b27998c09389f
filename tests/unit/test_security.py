"""Nothing let in, nothing let out: no code from data, no path out of a folder, no secret in what is
written.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import tables
from tests.planted import ENVIRONMENT, SECRETS, VALUE
from tests.refusals import refused
from tokenscale.analysis import queries
from tokenscale.base.errors import UserError, redact_credentials
from tokenscale.referee import claims
from tokenscale.runs.records import provenance
from tokenscale.settings import yaml_files as reading

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")])
RULES = sorted([*(ROOT / "workflow").rglob("*.smk"), ROOT / "workflow/Snakefile"])
TEMPLATES = sorted((ROOT / "src").rglob("*.j2"))

#: modules whose readers run code, or unpack files wherever an archive says
MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "tarfile",
    "zipfile",
}
CALLS = {"eval", "exec", "compile", "__import__"}
#: last parts of dotted names
METHODS = {"unpack_archive", "extractall", "from_pretrained", "load_dataset"}
#: what this project has written itself, or reads by a list of what it may name
ALLOWED = {
    ("tokenscale/train/models/library.py", "from_pretrained"),
    ("tokenscale/cli/export.py", "from_pretrained"),
    # runs no scripts of datasets since version 4, which is required; tests/unit/test_corpus.py
    # plants one
    ("tokenscale/data/corpus/stream.py", "load_dataset"),
    # its Unpickler finds DCP's own classes alone; tests/unit/test_models_dcp.py plants others
    ("tokenscale/train/models/dcp.py", "pickle"),
}


def offences(source: str, file: str) -> list[str]:
    """What a program does that data could use to run code or to leave a folder."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            found += [
                f"imports {n}"
                for n in names
                if n.split(".")[0] in MODULES and (file, n) not in ALLOWED
            ]
        if not isinstance(node, ast.Call):
            continue
        words = {word.arg: word.value for word in node.keywords}
        dotted = ast.unparse(node.func)
        last = dotted.split(".")[-1]
        if (
            dotted in CALLS
            or dotted in ("os.system", "os.popen")
            or last in METHODS
            and (file, last) not in ALLOWED
        ):
            found.append(f"calls {dotted}")
        if dotted in ("torch.load", "pickle.load", "pickle.loads"):
            found.append("calls torch.load")
        for word in ("allow_pickle", "trust_remote_code", "shell"):
            if word in words and not (
                isinstance(words[word], ast.Constant) and words[word].value is False
            ):
                found.append(f"{dotted} with {word}")
        if (
            dotted in ("yaml.load", "yaml.load_all")
            and ast.unparse(words.get("Loader", ast.Constant(None))) != "_Loader"
        ):
            found.append(f"{dotted} with another loader")
        if dotted in ("yaml.unsafe_load", "yaml.full_load"):
            found.append(f"calls {dotted}")
    return found


def test_no_program_runs_what_it_reads():
    names = {path: path.relative_to(ROOT).as_posix().removeprefix("src/") for path in SOURCES}
    found = {name: offences(path.read_text(encoding="utf-8"), name) for path, name in names.items()}
    assert len(found) > 100 and {name: what for name, what in found.items() if what} == {}
    assert issubclass(reading._Loader, yaml.SafeLoader)


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_every_word_that_a_rule_hands_to_a_shell_is_quoted(path):
    """But what the workflow says itself: numbers, flags that are there or not, and names of
    engines.
    """
    text = path.read_text(encoding="utf-8")
    own = ("threads", "resources.share", "params.strict", "params.engine", "params.logs")
    blocks = re.findall(r"shell:\n((?:\s+[rf]?\".*\"\n?)+)|shell\((.*?)\)", text)
    for words in ("".join(block) for block in blocks):
        for name in re.findall(r"(?<!\{)\{([^{}]+)\}(?!\})", words):
            assert name.endswith(":q") or name in own, f"{{{name}}} in {path.name}"
    assert "script:" not in text and "run:\n" not in re.sub(r"rule run:\n", "", text)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_links_of_a_page_lead_to_the_report_s_own_files(path):
    text = path.read_text(encoding="utf-8")
    starts = (
        "#",
        "figures/",
        "data/",
        "sql/",
        "{{ p.href }}",
        '{{ p.href or "#" ~ p.name }}',
        "{{ claims.file }}",
        "{{ c.href }}",
        "{{ links[text] }}",
        "{{ home",
        "{{ href }}",
    )
    for where in re.findall(r"(?:href|src)=[\"']([^\"']*(?:\"[^\"]*\")?[^\"']*)[\"']", text):
        assert where.startswith(starts), where
    assert "|safe" not in text.replace(" ", "") and "autoescape" not in text
    if "<html" in text or "doctype" in text.lower():
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
        assert policy and "default-src 'none'" in policy[1] and "script-src" not in policy[1]
    else:
        assert "<script" not in text.lower()


# --- queries

HOSTILE = [
    "x'; DROP TABLE runs; --",
    'a"b',
    "<script>alert(1)</script>",
    "external-%s{}$warmup_steps",
    "é\\'\n",
]


def test_names_of_runs_are_values_in_every_query(tmp_path):
    folder = tmp_path / "it's [a] *folder?"
    rows = [
        tables.run(name, series=name, approach=name, factors=name, repeat=i)
        for i, name in enumerate(HOSTILE)
    ]
    steps = [row for name in HOSTILE for row in tables.steps(name, 8)]
    tables.write(
        folder, runs=rows, steps=steps, events=[tables.validation(name, 8, 2.0) for name in HOSTILE]
    )
    connection = queries.connect(folder)
    for query in queries.PARAMETERS:
        queries.query(query, connection)
    assert connection.execute("SELECT count(*) FROM runs").fetchone() == (len(HOSTILE),)
    assert sorted(queries.query("throughput", connection)["run_id"]) == sorted(HOSTILE)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT getenv('HF_TOKEN') AS value",
        "SELECT content AS value FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('{other}')",
        "COPY runs TO '{other}'",
        "ATTACH '{other}' AS other",
        "INSTALL httpfs",
        "SELECT 1; SELECT 2",
        "SET enable_external_access = true",
        "CREATE TABLE x AS SELECT 1",
        "DROP VIEW runs",
        "SELECT * FROM '{other}'",
    ],
)
def test_a_ledger_s_sql_reads_its_tables_and_nothing_else(tmp_path, sql):
    (tmp_path / "other.csv").write_text("value\n1\n")
    folder = tables.write(tmp_path / "demo", runs=[tables.run("a")])
    opened = claims.ClaimTables("demo", folder)
    with pytest.raises(UserError, match="does not run"):
        opened.rows("claim", sql.replace("{other}", str(tmp_path / "other.csv")))
    assert (tmp_path / "other.csv").read_text() == "value\n1\n"
    opened.close()


# --- secrets


@pytest.fixture
def planted(monkeypatch):
    """Secrets of an environment, the hub's address among them; what they all hold."""
    for name, value in (ENVIRONMENT | {"HF_ENDPOINT": SECRETS["HTTPS_PROXY"]}).items():
        monkeypatch.setenv(name, value)
    return VALUE


def test_no_secret_of_the_environment_is_in_a_record(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["tokenscale", "train", "--data", f"https://me:{planted}@host/a.txt"]
    )
    provenance.seal_record(
        tmp_path, provenance.start_record(tmp_path, {"run_id": "x"}), {"status": "complete"}
    )
    record = json.loads((tmp_path / "run.json").read_text())
    assert planted not in (tmp_path / "run.json").read_text()
    assert (
        record["environment"]["NCCL_DEBUG"] == "INFO"
        and record["argv"][-1] == "https://…@host/a.txt"
    )


def test_a_whole_command_says_no_secret(planted, tmp_path):
    """A corpus from an address that does not answer, by a proxy with a password, in a process of
    its own.
    """
    settings = {"name": "x", "source": {"kind": "url", "files": ["http://127.0.0.1:9/a.txt"]}}
    imports = "from tokenscale.cli.main import main; from tokenscale.data.corpus import download"
    script = f"{imports}; download.TRIES = 1; raise SystemExit(main())"
    command = [sys.executable, "-c", script, "download", "--settings", json.dumps(settings)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "d/manifest.json")], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert planted not in done.stdout + done.stderr + written


@pytest.mark.parametrize(
    "name", ["X-Amz-Signature", "X-Goog-Signature", "sig", "token", "access_token", "api_key"]
)
def test_messages_carry_no_password_and_no_signature_of_an_address(name):
    address = f"https://host/a.txt?part=1&{name}=planted%2B7&x=2"
    assert (
        redact_credentials(f"no answer from {address}.")
        == f"no answer from https://host/a.txt?part=1&{name}=…&x=2."
    )
    assert redact_credentials(address.replace(name, name.upper())).count("planted") == 0
    told = str(
        UserError(
            "no answer from https://me:planted@host/x.",
            reason="via http://planted@p:1/, ftp://a:b@c",
        )
    )
    assert "planted" not in told and "a:b" not in told and "host/x" in told
    innocents = (
        "https://host/a@b",
        "me@host",
        "http://host:80/?q=x@y",
        "a//b/c@d",
        "// @ a comment",
    )
    for innocent in (
        "https://host/a?signal=1&tokens=5",
        "sig=1 and token=2",
        "https://host/a?design=x",
        *innocents,
    ):
        assert redact_credentials(innocent) == innocent


# --- code from hubs


@pytest.mark.parametrize("key", ["trust_remote_code", "auto_map", "code_revision"])
def test_code_of_a_hub_cannot_be_asked_for(tmp_path, capsys, key):
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps({"tokenizers": {"t": {"kind": "huggingface", "source": "a/b", key: True}}})
    )
    assert f"unknown key '{key}'" in refused(capsys, ["check", "--configfile", path])
