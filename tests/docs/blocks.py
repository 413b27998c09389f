"""The code blocks and the commands in the prose of the documents, and how `blocks.yaml` has each of
them run.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
#: documents whose blocks build the demo. Both run an experiment on the same text of a user, whose
#: runs are trained once
BUILDING = ["docs/first-hour.md", "README.md"]
#: documents whose blocks run in order in one checkout: first those that need a demo, each group in
#: its copy of what BUILDING left
GROUPS = [
    ["docs/approaches.md", "docs/experiments.md", "docs/data.md"],
    [
        *("docs/results.md", "docs/source-studies.md", "docs/training.md"),
        *("docs/evaluation.md", "docs/report.md"),
    ],
    [
        *("docs/other-trainers.md", "docs/parallelism.md", "docs/clusters.md"),
        *("docs/troubleshooting.md", "docs/index.md"),
    ],
    ["docs/extend.md"],
    ["docs/settings.md", "docs/development.md"],
    ["profiles/alps/README.md"],
]
NEED_DEMO = GROUPS[:3]
#: run by make long-test; of these documents the gate applies the diffs alone
LONG = GROUPS[1:4]
DOCUMENTS = [name for group in (BUILDING, *GROUPS) for name in group]
PATTERNS = ("README.md", "docs/*.md", "profiles/*/README.md")
#: languages whose blocks are run, and those of output and of diagrams
RUN = ("sh", "console", "python", "yaml", "toml", "diff")
SHOWN = ("text", "mermaid", "directive")
#: a `text` block that begins with one of these is a command under a false name
COMMANDS = (
    "$",
    "python",
    "snakemake",
    "make",
    "tokenscale ",
    ".venv/",
    "torchrun",
    "git",
    "srun",
    "sbatch",
    "pip",
)
SUBSTITUTIONS = ("placeholders", "small", "dry_runs")
#: a program of the environment without its folder: a fresh shell does not find it
BARE = re.compile(
    r"(?:^|[;&|] ?|\$ )(?:snakemake|tokenscale|python|pip|torchrun) [^|]", re.MULTILINE
)
#: how a command in prose or in a table is run: (pattern, replacement); other commands of the
#: package show their help
PROSE = (
    (r"^make ", "make --dry-run "),
    (r"^\.venv/bin/torchrun .*?-m tokenscale", ".venv/bin/tokenscale"),
    (
        (
            r"^(\.venv/bin/(?!snakemake|pip)(?!\S+ (?:advise|arm|plan|status)\b)\S+ .*?)(?: …)?(?: "
            r"--help)?$"
        ),
        r"\1 --help",
    ),
)
#: of a block that hangs
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Block:
    """A code block. `path`: the file that it is, by the word behind its language or by a comment in
    its first line.
    """

    document: str
    line: int
    language: str
    path: str | None
    text: str

    @property
    def place(self) -> str:
        """Where a person finds it."""
        return f"{self.document}:{self.line}"


def blocks_of(document: str, text: str) -> list[Block]:
    """Every code block of a document in order, an indented one as `indented`, and commands in its
    text as `prose`.
    """
    found = []
    for token in MarkdownIt().enable("table").parse(text):
        for part in token.children or ():
            if part.type == "code_inline" and re.match(r"(\.venv/bin/\w+|make) \S", part.content):
                found.append(Block(document, token.map[0] + 1, "prose", None, part.content))
            elif part.type == "code_inline" and BARE.match(part.content):
                found.append(Block(document, token.map[0] + 1, "bare", None, part.content))
        if token.type in ("fence", "code_block"):
            language, _, path = (
                token.info.strip().partition(" ") if token.type == "fence" else ("indented", "", "")
            )
            language = "directive" if language.startswith("{") else language  # of Sphinx
            comment = re.match(r"# ([\w./-]+\.(?:yaml|toml))\n", token.content)
            path = path or (comment[1] if comment and language in ("yaml", "toml") else None)
            found.append(Block(document, token.map[0] + 1, language, path, token.content))
    return found


def all_blocks() -> list[Block]:
    """The blocks of all documents; those in prose follow the others; equal commands occur once."""
    found = [
        block
        for name in DOCUMENTS
        for block in blocks_of(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    lines = {line for block in found if block.language in RUN for line in block.text.splitlines()}
    prose = {
        block.text: block
        for block in reversed(found)
        if block.language == "prose" and block.text not in lines
    }
    return [block for block in found if block.language != "prose"] + list(reversed(prose.values()))


def plan() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("blocks.yaml").read_text(encoding="utf-8"))


def entry_of(block: Block, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry of a block: its text is part of the block's."""
    of_document = (
        e for e in entries if e["document"] == block.document and block.language != "prose"
    )
    return next((e for e in of_document if e["block"] in block.text), None)


def problems(blocks: list[Block], planned: dict[str, Any]) -> list[str]:
    """Blocks that are neither run nor listed, and entries of the plan that belong to no block."""
    found = []
    for block in blocks:
        listed = entry_of(block, planned["listed"])
        entry = entry_of(block, planned["blocks"])
        if block.language == "bare" or (
            block.language in ("sh", "console") and BARE.search(block.text)
        ):
            found.append(
                f"{block.place}: name the program with its folder, .venv/bin/: {block.text[:60]!r}"
            )
        elif block.language not in (*RUN, *SHOWN, "prose"):
            found.append(
                f"{block.place}: write a fenced block with one of the languages "
                f"{', '.join((*RUN, *SHOWN))}"
            )
        elif block.language == "text" and block.text.startswith(COMMANDS):
            found.append(f"{block.place}: these are commands, so the language is sh or console")
        elif listed and entry:
            found.append(f"{block.place}: is listed as not run, and planned under `blocks`")
        elif (
            block.language in ("yaml", "toml")
            and not listed
            and not (entry and (block.path or "file" in entry))
        ):
            found.append(
                f"{block.place}: add the file it belongs to and the command that checks it to "
                "blocks.yaml"
            )
        elif block.language == "diff" and not block.path:
            found.append(f"{block.place}: name the file behind the language")
    for entry in [*planned["listed"], *planned["blocks"]]:
        there = [
            b
            for b in blocks
            if b.document == entry["document"] and b.language not in (*SHOWN, "prose")
        ]
        matching = [b.place for b in there if entry["block"] in b.text]
        if len(matching) != 1:
            found.append(
                f"blocks.yaml: {entry['document']}, {entry['block']!r} is part of "
                f"{matching or 'no block'}"
            )
    texts = [block.text for block in blocks if block.language in (*RUN, "prose")]
    found += [
        f"blocks.yaml: {word!r} stands in no block"
        for kind in SUBSTITUTIONS
        for word in planned[kind]
        if not any(word in text for text in texts)
    ]
    found += [
        f"blocks.yaml: no block calls {program}"
        for program in planned["programs"]
        if not any(re.search(rf"\b{program}\b", text) for text in texts)
    ]
    return found


class Failed(Exception):
    """What went wrong in a block."""


class Checkout:
    """A copy of the project, in which the blocks of some documents run in order."""

    def __init__(self, root: Path, python: str, planned: dict[str, Any]):
        self.root = root
        self._plan = planned
        home = root.parent / "home"
        programs = root / ".venv/bin"
        for folder in (home, root / ".venv"):  # of other blocks, in what this is a copy of
            shutil.rmtree(folder, ignore_errors=True)
        standing_in = home / "programs"
        standing_in.mkdir(parents=True)
        self._exported = home / ".exported"
        self._called = home / ".called"
        programs.mkdir(parents=True)
        (programs / "python").symlink_to(python)
        for module in ("snakemake", "tokenscale", "torch.distributed.run"):
            name = "torchrun" if "torch" in module else module
            self._write(programs / name, f'exec {python} -m {module} "$@"')
        self._write(programs / "pip", "test $1 = install")
        for name, line in planned["programs"].items():
            self._write(standing_in / name, f"echo {name} >> {self._called}\n{line}")
        # as the Makefile names it: otherwise `make` would install this checkout into the tests'
        # environment
        ready = ["make", "--silent", "--eval", "print-ready: ; @echo $(READY)", "print-ready"]
        done = subprocess.run(ready, cwd=root, capture_output=True, text=True, check=True)
        (root / done.stdout.strip()).touch()
        # short: worker processes name sockets in it, whose paths have at most 107 characters
        self._temporary = tempfile.TemporaryDirectory(prefix="docs-")
        # a shell in which no environment is activated
        outside = [
            folder
            for folder in os.environ["PATH"].split(":")
            if Path(folder) != Path(sys.executable).parent
        ]
        self.environment = os.environ | {
            "HOME": str(home),
            "TMPDIR": self._temporary.name,
            "HF_HUB_OFFLINE": "1",
        }
        self.environment |= {
            "PATH": ":".join([str(standing_in), *outside]),
            "PYTHONPATH": str(root / "src"),
        }
        self.environment |= {
            name: value.replace("HOME", str(home)) for name, value in planned["environment"].items()
        }

    @staticmethod
    def _write(path: Path, script: str) -> None:
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def run(self, block: Block) -> str:
        """Run a block: `executed`, `dry run` or `listed`. Raises Failed."""
        if entry_of(block, self._plan["listed"]):
            return "listed"
        entry = entry_of(block, self._plan["blocks"]) or {}
        text = block.text
        dry = False
        for kind in SUBSTITUTIONS:
            for word, value in self._plan[kind].items():
                dry |= kind == "dry_runs" and word in text
                text = text.replace(word, value)
        if not entry.get("real"):
            text, number = re.subn(r"(?<!: )\.venv/bin/snakemake(?! -n)", r"\g<0> -n", text)
            dry |= bool(number)
        self._called.write_text("")
        self.shell(entry.get("before", ""))
        if block.language == "sh":
            self.shell(text, exits=entry.get("exit", 0))
        elif block.language == "prose":
            for pattern, replacement in PROSE:
                text = re.sub(pattern, replacement, text)
            self.shell(text)
            dry = True
        elif block.language == "console":
            self._console(text, exits=entry.get("exit", 0))
        elif block.language == "diff":
            self.shell("git apply -", input=text)
        elif block.language == "python" and not block.path:
            (self.root / "block.py").write_text(text)
            self.shell(".venv/bin/python block.py")
        else:
            self._file(block.path or entry["file"], text, entry)
        self.shell(entry.get("check", ""))
        if "file" in entry:  # a fragment is nobody else's
            (self.root / entry["file"]).unlink()
        return "dry run" if dry or self._called.read_text() else "executed"

    def _file(self, name: str, text: str, entry: dict[str, Any]) -> None:
        """Write a file that a block shows, whole, inside the text `around` it, or (`merge`) over
        what is there.
        """
        path = self.root / name
        if entry.get("merge") and path.suffix == ".yaml":
            text = yaml.safe_dump(yaml.safe_load(path.read_text()) | yaml.safe_load(text))
        elif entry.get("merge"):  # keys of a TOML file, none of a table
            keys = "|".join(map(re.escape, tomllib.loads(text)))
            text += re.sub(rf"^(?:{keys}) *=.*\n", "", path.read_text(), flags=re.MULTILINE)
        elif around := entry.get("around"):
            ((indent, line),) = re.findall(r"^( *)(BLOCK\n)", around, re.MULTILINE)
            inside = "".join(indent + part for part in text.splitlines(keepends=True))
            text = around.replace(indent + line, inside)
        elif path.exists() and not name.startswith("profiles/"):
            raise Failed(f"{name} is there already")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def _console(self, text: str, exits: int) -> None:
        """Run the lines behind `$ `. Each line below must be one of the output, up to where it says
        `…`.
        """
        commands = re.sub(r"^(?!\$ ).*\n?", "", text, flags=re.MULTILINE).replace("$ ", "", 1)
        output = self.shell(commands, exits)
        for line in text.splitlines():
            # messages name no folder here (served.py)
            shown = line.split("…")[0].strip().replace(".venv/bin/", "")
            if not line.startswith("$ ") and shown not in output:
                raise Failed(f"the output has no line\n  {shown}\nin\n{output[-3000:]}")

    def shell(self, text: str, exits: int = 0, input: str | None = None) -> str:
        """Run lines of shell, and keep what they export for later blocks. Returns stdout and stderr
        together.
        """
        if not text.strip():
            return ""
        kept = (
            f"[ ! -e {self._exported} ] || . {self._exported}\ntrap 'export -p > "
            f"{self._exported}' EXIT"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options = {
            "cwd": self.root,
            "env": self.environment,
            "text": True,
            "start_new_session": True,
        }
        process = subprocess.Popen(
            ["bash", "-c", f"set -eo pipefail\n{kept}\n{text}"], **pipes, **options
        )
        try:
            output, _ = process.communicate(input or "", timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise Failed(
                f"takes longer than {TIMEOUT_S} s:\n{text}\n{process.communicate()[0][-3000:]}"
            ) from None
        if process.returncode != exits:
            raise Failed(
                f"exit code {process.returncode}, expected {exits}:\n{text}\n{output[-4000:]}"
            )
        return output
