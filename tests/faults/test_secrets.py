"""Thirty secrets in the environment, on the command line, in the working tree and in addresses: in
no file of results/.

They are looked for as they were planted, literally. What records need (hashes, names, sizes) stays
as it is.
"""

import base64
import json
import random
import string
import subprocess
import sys

import pytest

from tests.faults.kills import small_project
from tests.workflow.conftest import RUNS, Project
from tokenscale.runs.records.external import ExternalRun
from tokenscale.runs.records.redaction import redact

pick = random.Random(26)


def drawn(length: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(pick.choices(letters, k=length))


HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + string.digits
SECRET64 = string.ascii_letters + string.digits
KEY_LINES = [drawn(64, SECRET64 + "+/") for _ in range(3)]


def signed_token() -> str:
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("=")
    return f"{head}.{drawn(48)}.{drawn(43)}"


#: what it is → (secret, how it stands in a file or on a command line)
PLANTED = {
    "AWS access key": (f"AKIA{drawn(16, UPPER)}", "{}"),
    "AWS secret key": (drawn(36) + "/a+7", "aws_secret_access_key = {}"),
    "AWS secret key alone": (drawn(20) + "/9Zq+" + drawn(15), "{}"),
    "AWS session token": (drawn(120) + "==", "AWS_SESSION_TOKEN={}"),
    "Hugging Face": (f"hf_{drawn(34)}", "login(token='{}')"),
    "W&B key": (drawn(40, HEX), "WANDB_API_KEY={}"),
    "W&B login": (drawn(40, HEX), "wandb login {}"),
    "GitHub": (f"ghp_{drawn(36)}", "{}"),
    "GitHub, fine-grained": (f"github_pat_{drawn(22)}_{drawn(59)}", "{}"),
    "GitLab": (f"glpat-{drawn(20)}", "git clone https://oauth2:{}@gitlab.example/x.git"),
    "Slack": (f"xoxb-{drawn(12, string.digits)}-{drawn(24)}", "{}"),
    "Slack hook": (
        f"T{drawn(8, UPPER)}/B{drawn(8, UPPER)}/{drawn(24)}",
        "https://hooks.slack.com/services/{}",
    ),
    "JSON web token": (signed_token(), "{}"),
    "bearer": (drawn(32, string.ascii_lowercase + string.digits), "Authorization: Bearer {}"),
    "basic": (
        base64.b64encode(f"me:{drawn(12)}".encode()).decode(),
        'headers = {{"Authorization": "Basic {}"}}',
    ),
    "OpenAI": (f"sk-proj-{drawn(48)}", "{}"),
    "Anthropic": (f"sk-ant-api03-{drawn(40)}-{drawn(20)}", "{}"),
    "Google key": (f"AIza{drawn(35)}", "{}"),
    "Google token": (f"ya29.{drawn(60)}", "{}"),
    "Stripe": (f"sk_live_{drawn(24)}", "{}"),
    "npm": (f"npm_{drawn(36)}", "//registry.example/:_authToken={}"),
    "PyPI": (f"pypi-{drawn(80)}", "password = {}"),
    "Azure": (
        drawn(84) + "==",
        "DefaultEndpointsProtocol=https;AccountName=me;AccountKey={};EndpointSuffix=x",
    ),
    "password in an address": (f"pw{drawn(6)}", "https://me:{}@host.example/data.parquet"),
    "password of a database": (f"pw-{drawn(6)}", "postgresql://me:{}@db.example/runs"),
    "signature of an address": (drawn(40) + "%3D", "https://host.example/a.txt?X-Amz-Signature={}"),
    "netrc": (f"net{drawn(8)}7", "machine host.example login me password={}"),
    "setting": (f"correct-horse-{drawn(4)}", 'database_password: "{}"'),
    "variable": (f"x9-{drawn(6)}", "DB_PASSWORD={}"),
    "private key": (
        "\n".join(KEY_LINES),
        "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----",
    ),
    "private key in JSON": (
        drawn(64) + "\\n" + drawn(64),
        '{{"private_key": "-----BEGIN RSA PRIVATE KEY-----\\n{}\\n-----END RSA PRIVATE KEY-----"}}',
    ),
}
#: what has no form of its own: a name says that it is secret
UNNAMED = (
    "W&B",
    "bearer",
    "basic",
    "password",
    "signature",
    "netrc",
    "setting",
    "variable",
    "Slack hook",
    "private",
)


def lines() -> list[str]:
    return [form.format(secret) for secret, form in PLANTED.values()]


def found_in(text: str) -> list[str]:
    """What of the planted secrets a text holds, of a key of several lines any line."""
    return [
        what
        for what, (secret, _) in PLANTED.items()
        if any(part in text for part in secret.replace("\\n", "\n").splitlines())
    ]


def test_each_form_is_redacted_and_the_rest_of_its_line_stays():
    assert len(PLANTED) >= 30
    assert not found_in(redact("\n".join(lines())))
    for line in lines():
        assert not found_in(redact(line)), line
        assert not found_in(redact("+" + line.replace("\n", "\n+"))), line
    assert redact("AccountName=me;AccountKey=abc123+/abc123==;EndpointSuffix=x").endswith(
        ";EndpointSuffix=x"
    )
    key = redact("+" + lines()[-2].replace("\n", "\n+"))
    # a diff has as many lines as before
    assert key.splitlines()[1:-1] == ["+…"] * 3 and len(key.splitlines()) == 5


@pytest.mark.parametrize(
    "kept",
    [
        "1df2e0b61b1b5e9c9a8f7d6e5c4b3a2918070605",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        (
            '{"code": {"train/loop.py": '
            '"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}}'
        ),
        "results/runs/packed-llama-micro-single-w1-de2e0c82be/attempt=00/rank=00000/steps.jsonl",
        "results/tokens/TinyStoriesV2-GPT4/tekken/padded-sequence_length=2048/manifest.json",
        (
            '{"tokenizer": {"name": "bpe", "vocabulary_size": 300}, "flops_per_token": 9.26e9, '
            '"bos_token": null}'
        ),
        (
            "+    token = next(iter(tokens_by_rank))\n-    password: str | None = None\n+    key = "
            "sorted(keys)[0]"
        ),
        "NCCL INFO Using network AWS Libfabric, NVIDIA H100 80GB HBM3, 2026-11-25T03:05:17Z",
        "index 1dbf8a9..3066271 100644",
        "https://host.example:80/TinyStoriesV2-GPT4-train.txt?part=1",
    ],
)
def test_what_records_need_stays(kept):
    assert redact(kept) == kept


def test_no_secret_is_in_any_file_of_a_workflow_s_results(tmp_path, monkeypatch):
    for number, (what, (secret, _)) in enumerate(PLANTED.items()):
        monkeypatch.setenv(f"PLANTED_{number}", secret.splitlines()[0])
        named = what.startswith(UNNAMED)
        monkeypatch.setenv(f"FI_PLANTED_{number}{'_PASSWORD' * named}", secret.splitlines()[0])
        monkeypatch.setenv(f"NCCL_PLANTED_{number}", PLANTED[what][1].format(secret))
    monkeypatch.setenv("TOKENSCALE_KEEP_DIFF", "1")
    experiment = {
        "question": "Who sees secrets?",
        "runs": RUNS | {"approach": "packed"},
        "factors": {"seed": [0, 1]},
    }
    project = small_project(tmp_path, "seen", experiment | {"figures": ["loss_over_time"]})
    root = project.root
    (root / ".gitignore").write_text("results\n.snakemake\n__pycache__\n")
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@host.example"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=root, check=True, env=project.environment)
    module = root / "src/tokenscale/train/loop.py"
    module.write_text(
        module.read_text() + "".join(f"# {line}\n" for line in lines() if "\n" not in line)
    )
    (root / "src/tokenscale/new_module.py").write_text('"""\n' + "\n".join(lines()) + '\n"""\n')
    project.snakemake("--cores", "2")
    diffs = list(root.glob("results/runs/*/dirty.diff"))
    assert len(diffs) == 2 and all("new_module.py" in path.read_text() for path in diffs)
    arguments = [
        word for what, (secret, form) in PLANTED.items() for word in ("--note", form.format(secret))
    ]
    arguments += ["--password", PLANTED["variable"][0], f"--wandb-api-key={PLANTED['W&B key'][0]}"]
    monkeypatch.setattr(sys, "argv", ["loop.py", *arguments, "--learning-rate", "0.001"])
    facts = {"steps": 1, "global_batch": 1, "sequence_length": 8, "world_size": 1, "device": "cpu"}
    with ExternalRun(root / "results/runs/external-run", approach="external", **facts) as run:
        run.step(loss_sum=1.0, useful_tokens=8, total_tokens=8, rows=1)
    record = json.loads((root / "results/runs/external-run/run.json").read_text())
    assert (
        record["argv"][-2:] == ["--learning-rate", "0.001"]
        and "FI_PLANTED_0" in record["environment"]
    )
    for source in ("password in an address", "signature of an address"):
        settings = {
            "name": "x",
            "source": {"kind": "url", "files": [PLANTED[source][1].format(PLANTED[source][0])]},
        }
        told = refused(project, json.dumps(settings))
        (root / "results/logs/refused.log").write_text(told)
    files = [path for path in root.glob("results/**/*") if path.is_file()]
    assert len(files) > 60
    assert {
        str(path): what
        for path in files
        if (what := found_in(path.read_bytes().decode("utf-8", "replace")))
    } == {}


def refused(project: Project, settings: str) -> str:
    code = "from tokenscale.cli.main import main; import tokenscale.data.corpus.download as d"
    code += "; d.TRIES = 2; d.sleep = id"
    words = ["download", "--settings", settings, "--output", "results/x/manifest.json"]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; raise SystemExit(main())", *words],
        cwd=project.root,
        env=project.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    return done.stdout + done.stderr


def test_a_long_word_takes_time_in_proportion_to_its_length():
    """With a pattern that begins anew at each letter, this takes minutes."""
    word = "a1" * 50_000
    assert redact(word) == word
    assert redact(f"x{word}_token=abcdef1") == f"x{word}_token=…"
