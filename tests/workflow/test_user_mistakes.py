"""Mistakes of users and the message each gets: exit code 2, the file or the key, the next step, no traceback."""

import argparse
import contextlib
import importlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import snakemake_logger_plugin_tokenscale
from tests import tables
from tests.refusals import refused
from tests.workflow import forked
from tests.workflow.conftest import EXPERIMENTS, ROOT, RUNS, Project, make_project
from tokenscale.cli import main as cli
from tokenscale.report.save import KINDS

pytestmark = pytest.mark.slow(20)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Project:
    """A project with nothing built, for all mistakes: each writes files of its own only."""
    return make_project(tmp_path_factory.mktemp("mistakes"))


def said_by(command: str, project: Project, monkeypatch, capfd) -> tuple[int, str]:
    """(exit code, output) of a command line in the project: tokenscale's in this process, Snakemake's in a fork."""
    program, *arguments = shlex.split(command)
    if program == "make":
        makefile = ["--file", str(ROOT / "Makefile"), "READY=", f"VENV={sys.prefix}"]
        options = {"cwd": project.root, "env": project.environment, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(["make", *makefile, *arguments], **options, stdout=subprocess.PIPE)
        return done.returncode, done.stdout
    if program == "snakemake":
        return forked.snakemake([*arguments, "-n", "--quiet", "host"], project.root, project.environment)
    monkeypatch.chdir(project.root)
    capfd.readouterr()
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    output = capfd.readouterr()
    return code, output.out + output.err


@dataclass(frozen=True)
class Mistake:
    """A command with a mistake in it or in the files that `arrange` writes, and words that the message must hold."""

    what: str
    command: str
    words: tuple[str, ...]
    arrange: Callable[[Path], object] = lambda root: None


def config(text: str | dict) -> Callable[[Path], object]:
    """Write the user's own configuration file."""
    return lambda root: (root / "mine.yaml").write_text(text if isinstance(text, str) else json.dumps(text))


def experiment(**values: object) -> Callable[[Path], object]:
    """Write a folder with one experiment, and a configuration that chooses it."""

    def arrange(root: Path) -> None:
        (root / "own").mkdir(exist_ok=True)
        (root / "own/ways.yaml").write_text(json.dumps(EXPERIMENTS["ways"] | values))
        config({"experiments_folder": "own", "experiments": ["ways"]})(root)

    return arrange


def file(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Write a file of the project."""

    def arrange(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return arrange


def written(text: str) -> Callable[[Path], object]:
    """Write a file of one experiment, and a configuration that chooses it."""
    return lambda root: (experiment()(root), file("own/ways.yaml", text)(root))


def claims(text: str) -> Callable[[Path], object]:
    """Write a file of claims, and a configuration that names it."""
    return lambda root: (file("c.yaml", text)(root), config("claims: c.yaml\n")(root))


def machine(text: str) -> Callable[[Path], object]:
    """Write a machine's file, and a configuration that names it."""
    return lambda root: (file("m.toml", text)(root), config("machine: m.toml\n")(root))


def corpus(lines: list[str]) -> Callable[[Path], object]:
    """Build a corpus of these lines of JSON, and a tokenizer of numbers."""

    def arrange(root: Path) -> None:
        file("own.jsonl", "\n".join(lines))(root)
        settings = {"name": "own", "source": {"kind": "files", "files": ["own.jsonl"]}}
        with contextlib.chdir(root):
            assert cli.main(["corpus", "--settings", json.dumps(settings), "--output", "c/manifest.json"]) == 0
            kind = '{"name": "t", "kind": "numbers", "vocabulary_size": 20}'
            assert cli.main(["tokenizer", "--settings", kind, "--output", "t/manifest.json"]) == 0

    return arrange


MINE, PLAN = "snakemake --configfile mine.yaml", "tokenscale plan --configfile mine.yaml"
CHECK = "tokenscale check ways --configfile mine.yaml"
PRETOKENIZE = "tokenscale pretokenize --store packed-split=validation --corpus c/manifest.json"
PRETOKENIZE += " --tokenizer t/manifest.json --output s/manifest.json"
PAGE = b"<!DOCTYPE html>\n<html><body>404: not found</body></html>\n"
TEXT = "Once upon a time there was a text.\n" * 50
#: key of an experiment's runs, changed
CHANGED = {"runs": RUNS | {"sequence_length": -1}}

MISTAKES = [
    # the configuration
    Mistake("a key is misspelt", MINE, ("expriments", "did you mean 'experiments'"), config("expriments: [ways]\n")),
    Mistake("a number in place of a list", MINE, ("experiments", "list"), config("experiments: 3\n")),
    Mistake("an unknown scale", MINE, ("scale", "did you mean 'alps'"), config("scale: alp\n")),
    Mistake("an unknown corpus", MINE, ("corpus", "did you mean 'small'"), config("corpus: smal\n")),
    Mistake("an unknown experiment", MINE, ("experiments", "did you mean 'ways'"), config("experiments: [way]\n")),
    Mistake("an experiment twice", MINE, ("experiments", "ways"), config("experiments: [ways, ways]\n")),
    Mistake("YAML that does not parse", MINE, ("mine.yaml, line 1",), config("experiments: [ways\n")),
    Mistake("YAML that does not parse, to plan", PLAN, ("mine.yaml, line 3",), config("scale: demo\n\na: b: c\n")),
    Mistake("tabs in YAML", MINE, ("mine.yaml, line 2",), config("corpora:\n\tmine: 3\n")),
    Mistake("a key twice", MINE, ("mine.yaml, line 2", "key 'scale'"), config("scale: demo\nscale: alps\n")),
    Mistake("a list as configuration", MINE, ("mine.yaml", "mapping", "a list"), config("- experiments\n")),
    Mistake("an empty configuration", MINE, ("mine.yaml", "mapping", "nothing"), config("# scale: demo\n")),
    Mistake("a folder as configuration", "snakemake --configfile config", ("config",)),
    Mistake("a folder as configuration to plan", "tokenscale plan --configfile config", ("config",)),
    Mistake(
        "a missing configuration file", "snakemake --configfile min.yaml", ("did you mean mine.yaml?",), config("{}")
    ),
    Mistake("--config without = to plan", "tokenscale plan --config scale", ("--config", "scale", "key=value")),
    Mistake("--config with an unknown key", "snakemake --config sclae=demo", ("--config", "did you mean 'scale'")),
    Mistake("malformed TOML", PLAN, ("m.toml", "line 2"), machine("cores_per_rank = 2\nminutes = = 3\n")),
    Mistake("a folder as machine file", PLAN, ("config",), config("machine: config\n")),
    Mistake(
        "a negative number of a machine", PLAN, ("m.toml", "cores_per_rank", "≥ 1"), machine("cores_per_rank = -2\n")
    ),
    Mistake("a malformed experiment", PLAN, ("own/ways.yaml, line 2",), written("question: q\nruns: {model: [\n")),
    Mistake("an empty experiment", PLAN, ("own/ways.yaml", "nothing"), written("")),
    # keys at the wrong level
    Mistake("runs in the configuration", MINE, ("mine.yaml", "runs of an experiment"), config({"runs": {"seed": 1}})),
    Mistake(
        "a setting of runs in the configuration", PLAN, ("runs.optimizer.learning_rate",), config("learning_rate: 1\n")
    ),
    Mistake("a flag of train in the configuration", PLAN, ("runs.budget.steps",), config("training_steps: 1\n")),
    Mistake(
        "a setting of a corpus at the top", PLAN, ("corpora.NAME.validation_share",), config("validation_share: 0.1\n")
    ),
    Mistake(
        "files of a corpus without source",
        PLAN,
        ("corpora.NAME.source.files",),
        config({"corpora": {"a": {"files": "a"}}}),
    ),
    Mistake(
        "a setting of a machine in the configuration", PLAN, ("memory_mb of the machine",), config("memory_mb: 1\n")
    ),
    Mistake("a machine's file with a setting of runs", PLAN, ("m.toml", "runs.seed"), machine("seed = 1\n")),
    Mistake(
        "runs.learning_rate",
        MINE,
        ("own/ways.yaml", "runs.optimizer.learning_rate"),
        experiment(runs=RUNS | {"learning_rate": 1}),
    ),
    Mistake("learning_rate of an experiment", PLAN, ("runs.optimizer.learning_rate",), experiment(learning_rate=1)),
    Mistake("a degree outside of layout", PLAN, ("runs.layout.tensor",), experiment(runs=RUNS | {"tensor": 2})),
    Mistake("repeats in runs", PLAN, ("repeats of an experiment",), experiment(runs=RUNS | {"repeats": 2})),
    # a corpus that is too small
    Mistake(
        "two documents",
        PRETOKENIZE,
        ("corpora.own.validation_share", "2 documents"),
        corpus(['{"text": "one two"}', '{"text": "three four"}']),
    ),
    Mistake(
        "one document many times",
        PRETOKENIZE,
        ("299 duplicates", "corpora.own.cleaning.deduplicate"),
        corpus(['{"text": "one two"}'] * 300),
    ),
    Mistake("an empty folder of experiments", MINE, ("experiments",), config("experiments_folder: nowhere\n")),
    Mistake("a corpus without files", MINE, ("mine",), config({"corpora": {"mine": {"source": {"files": []}}}})),
    Mistake("no parts", MINE, ("corpora.small.parts",), config({"corpora": {"small": {"parts": 0}}})),
    Mistake(
        "parts of a source without files",
        MINE,
        ("corpora.small.parts", "docstrings", "one part"),
        config({"corpora": {"small": {"parts": 4}}}),
    ),
    Mistake(
        "more parts than files",
        MINE,
        ("mine.yaml", "corpora.own.parts", "4 parts, 1 file(s)"),
        lambda root: (
            file("own.txt", TEXT)(root),
            config({"corpus": "own", "corpora": {"own": {"source": {"files": "own.txt"}, "parts": 4}}})(root),
        ),
    ),
    Mistake(
        "more parts than files, of a target's path",
        "snakemake results/corpus/own/manifest.json --configfile mine.yaml",
        ("own", "4 parts, 1 file(s)"),
        lambda root: (
            file("own.txt", TEXT)(root),
            config({"corpora": {"own": {"source": {"files": "own.txt"}, "parts": 4}}})(root),
        ),
    ),
    Mistake(
        "a part by its path that a corpus does not have",
        "snakemake results/corpus/own/parts/00007/manifest.json --configfile mine.yaml",
        ("own", "00007", "00000 to 00001"),
        lambda root: (
            file("own1.txt", TEXT)(root),
            file("own2.txt", TEXT)(root),
            config({"corpora": {"own": {"source": {"files": "own*.txt"}, "parts": 2}}})(root),
        ),
    ),
    Mistake(
        "parts of a source that has no files",
        """tokenscale corpus --part 0 --output po/manifest.json --settings '{"parts":3}'""",
        ("parts", "docstrings", "one part"),
    ),
    Mistake(
        "a part that a corpus does not have",
        "tokenscale corpus --part 4 --output po/manifest.json"
        """ --settings '{"parts":3,"source":{"kind":"files","files":["x"]}}'""",
        ("--part", "0 to 2"),
    ),
    Mistake(
        "parts that are missing",
        "tokenscale corpus --output po/manifest.json"
        """ --settings '{"name":"o","parts":2,"source":{"kind":"files","files":["x"]}}'""",
        ("part of the corpus is missing", "snakemake -f po/parts/00000/manifest.json"),
    ),
    Mistake(
        "a machine's wrong key",
        MINE,
        ("cores_per_rnk", "did you mean 'cores_per_rank'"),
        lambda root: (config("machine: m.toml\n")(root), file("m.toml", "cores_per_rnk = 2\n")(root)),
    ),
    Mistake("a missing machine file", MINE, ("nope.toml",), config("machine: nope.toml\n")),
    Mistake(
        "a claims file with a wrong key",
        "snakemake claims --configfile mine.yaml",
        ("clams", "did you mean 'claims'"),
        claims("clams: {}\n"),
    ),
    *(
        Mistake(f"a claims file with {what}, {how}", command, words, claims(text))
        for what, text, words in (
            ("a wrong key", "clams: {}\n", ("clams", "did you mean 'claims'")),
            ("broken lines", "claims:\n\ta: 1\n", ("c.yaml, line 2",)),
        )
        for how, command in (("judged", "tokenscale claims --ledger c.yaml"), ("checked", CHECK))
    ),
    # experiments
    Mistake("a negative length", MINE, ("own/ways.yaml", "runs.sequence_length"), experiment(**CHANGED)),
    Mistake(
        "an unknown tokenizer",
        MINE,
        ("own/ways.yaml", "runs.tokenizer", "did you mean 'bpe'"),
        experiment(runs=RUNS | {"tokenizer": "bp"}),
    ),
    Mistake(
        "an unknown model",
        MINE,
        ("own/ways.yaml", "runs.model", "llama-micro"),
        experiment(runs=RUNS | {"model": "lama-micro"}),
    ),
    Mistake(
        "two corpora for one run",
        MINE,
        ("own/ways.yaml", "runs.corpus", "factors", "{corpus: [a, b]}"),
        experiment(runs=RUNS | {"corpus": ["a", "b"]}),
    ),
    Mistake("an unknown approach", MINE, ("own/ways.yaml", "packed"), experiment(factors={"approach": ["paked"]})),
    Mistake(
        "an unknown figure", MINE, ("own/ways.yaml", "figures", "loss_over_time"), experiment(figures=["los_over_time"])
    ),
    Mistake("a word for a number", MINE, ("own/ways.yaml", "repeats"), experiment(repeats="three")),
    # targets
    Mistake("a mistyped rule", "snakemake reprot", ("reprot", "did you mean report?")),
    Mistake("a mistyped experiment", "snakemake wayss", ("wayss", "did you mean ways?")),
    Mistake(
        "a mistyped figure",
        "snakemake results/figures/ways/los_over_time.svg",
        ("did you mean results/figures/ways/loss_over_time.svg?",),
    ),
    Mistake("no cores", "snakemake --cores 0", ("--cores",)),
    # commands
    Mistake("an unknown command", "tokenscale statsu", ("statsu", "did you mean 'status'?")),
    Mistake(
        "a mistyped flag",
        "tokenscale train --sequnce-length 8",
        ("--sequnce-length", "did you mean --sequence-length?"),
    ),
    Mistake("an unknown profile", "tokenscale plan --profile nope", ("nope", "alps")),
    Mistake("an unknown experiment to plan", "tokenscale plan way", ("way", "did you mean 'ways'")),
    Mistake("an unknown experiment to check", "tokenscale check way", ("way", "did you mean 'ways'")),
    Mistake("an unknown scale to check", "tokenscale check --scale alp", ("alp", "did you mean 'alps'")),
    Mistake("an unknown run", "tokenscale launch nope", ("nope",)),
    Mistake("a missing log", "tokenscale status --failed nope.log", ("nope.log",)),
    Mistake("an unknown target to look at", "tokenscale status --stale wayss", ("wayss", "did you mean ways?")),
    Mistake("a missing run table", "tokenscale ingest --experiment nope.json --output o", ("nope.json",)),
    Mistake(
        "a missing corpus manifest",
        "tokenscale ingest --experiment e.json --corpus nope.json --output o",
        ("nope.json",),
        file("e.json", '{"experiment": "e", "runs": []}'),
    ),
    Mistake(
        "a missing store manifest",
        "tokenscale ingest --experiment e.json --store nope.json --output o",
        ("nope.json",),
        file("e.json", '{"experiment": "e", "runs": []}'),
    ),
    Mistake(
        "a corpus manifest of something else",
        "tokenscale ingest --experiment e.json --corpus m.json --output o",
        ("m.json",),
        lambda root: (file("e.json", '{"experiment": "e", "runs": []}')(root), file("m.json", "[]")(root)),
    ),
    Mistake(
        "a benchmark of something else",
        "tokenscale ingest --experiment e.json --benchmark m.json --output o",
        ("m.json",),
        lambda root: (file("e.json", '{"experiment": "e", "runs": []}')(root), file("m.json", "[]")(root)),
    ),
    Mistake(
        "tables that are not there",
        "tokenscale report figure loss_over_time --tables results/tables/ways --output o",
        ("results/tables/ways", "snakemake -f results/tables/ways/runs.parquet"),
    ),
    Mistake(
        "an unknown figure to draw",
        "tokenscale report figure los_over_time --tables t --output o",
        ("los_over_time", "'loss_over_time'"),
    ),
    Mistake(
        "a page without an experiment's tables", "tokenscale report page --experiments wayss --output o", ("wayss",)
    ),
    Mistake("a prediction without tables", "tokenscale predict --tables nope", ("nope",)),
    Mistake("a checkpoint that is not there", "tokenscale generate --checkpoint nope --prompt a", ("nope",)),
    Mistake("a checkpoint folder that is none", "tokenscale generate --checkpoint config --prompt a", ("config",)),
    Mistake("generate without a model", "tokenscale generate --prompt a", ("--checkpoint",)),
    Mistake("a missing file of prompts", "tokenscale generate --checkpoint config --prompts-file nope", ("nope",)),
    Mistake("evaluate what is no checkpoint", "tokenscale evaluate --checkpoint config", ("config",)),
    Mistake("export what is no checkpoint", "tokenscale export --checkpoint config --output o", ("config",)),
    Mistake("a report that is none", "tokenscale diff config config", ("config",)),
    Mistake("verify what is not there", "tokenscale verify nope.svg", ("nope.svg",)),
    Mistake("track what is no run", "tokenscale track config --to tensorboard --output o", ("config",)),
    Mistake(
        "a checkpoint's record without a run",
        "tokenscale evaluate --checkpoint ck",
        ("ck/checkpoint.json",),
        file("ck/checkpoint.json", "{}"),
    ),
    Mistake(
        "a run table of something else",
        "tokenscale ingest --experiment m.json --output o",
        ("m.json",),
        file("m.json", '{"runs": [1]}'),
    ),
    Mistake(
        "a download of what is here", "tokenscale download --settings {} --output o/manifest.json", ("docstrings",)
    ),
    Mistake(
        "an unknown tracker",
        "tokenscale track config --to tensorbord --output o",
        ("tensorbord", "did you mean 'tensorboard'"),
    ),
    # a person's own files
    Mistake("text in UTF-16", "tokenscale advise t.txt", ("t.txt", "UTF-8"), file("t.txt", TEXT.encode("utf-16"))),
    Mistake("a web page called Parquet", "tokenscale advise t.parquet", ("t.parquet",), file("t.parquet", PAGE)),
    Mistake("an empty file", "tokenscale advise t.txt", ("t.txt",), file("t.txt", b"")),
    Mistake("a missing file", "tokenscale advise nope.jsonl", ("nope.jsonl",)),
    Mistake(
        "a key that lines do not have",
        "tokenscale advise t.jsonl",
        ("t.jsonl", "text"),
        file("t.jsonl", '{"txt": "a"}\n' * 9),
    ),
    Mistake("a broken line of JSON", "tokenscale advise t.jsonl", ("t.jsonl",), file("t.jsonl", '{"text": "a"\n' * 9)),
    Mistake(
        "an output folder inside a file",
        "tokenscale pretokenize --input-path t.txt --output-dir t.txt/o",
        ("t.txt",),
        file("t.txt", TEXT),
    ),
    Mistake(
        "a file to pretokenize that is missing",
        "tokenscale pretokenize --input-path nope.txt --output-dir o",
        ("nope.txt",),
    ),
    Mistake(
        "a damaged corpus manifest",
        "tokenscale pretokenize --store packed --corpus c/manifest.json --output o/manifest.json",
        ("c/manifest.json",),
        file("c/manifest.json", '{"schema_ver'),
    ),
    Mistake(
        "an unknown format",
        "tokenscale pretokenize --store paked --corpus c/manifest.json --output o/manifest.json",
        ("paked", "packed"),
    ),
    Mistake(
        "a format that no longer exists",
        "tokenscale pretokenize --store archive-eos=true --corpus c/manifest.json --output o/manifest.json",
        ("archive no longer exists", "codec: zstd"),
    ),
    Mistake("negative steps", "tokenscale train --training-steps -5", ("-5", "≥")),
    Mistake("a word for a number of steps", "tokenscale train --training-steps many", ("many", "integer")),
    Mistake("a learning rate that is none", "tokenscale train --learning-rate nan", ("nan",)),
    Mistake("more degrees than ranks", "tokenscale train --world-size 2 --layout.tensor 4", ("4", "2")),
    Mistake("an unknown dataset", "tokenscale train --dataset smal", ("smal",)),
    Mistake(
        "settings that are no JSON",
        "tokenscale tokenizer --settings {kind --output o/manifest.json",
        ("settings", "{kind"),
    ),
    Mistake(
        "settings with a wrong key", "tokenscale tokenizer --settings '{\"knd\": 1}' --output o/manifest.json", ("knd",)
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_gets_one_message(mistake, shared, monkeypatch, capfd):
    mistake.arrange(shared.root)
    code, output = said_by(mistake.command, shared, monkeypatch, capfd)
    assert "Traceback" not in output and 'File "/' not in output, output
    assert code == 2, output
    messages = [line for line in output.splitlines() if line.startswith("tokenscale: ")]
    assert len(messages) == 1, output
    assert any(line.startswith("  next ") for line in output.splitlines()), output
    for word in mistake.words:
        assert word in output, output


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("min.yaml", None, ("min.yaml", "did you mean mine.yaml?")),
        ("mine.yaml", "experiments: [ways\n", ("mine.yaml", "line 1")),
        ("mine.yaml", "scale: demo\nscale: alps\n", ("mine.yaml", "duplicate key 'scale'")),
        ("mine.yaml", "- experiments\n", ("mine.yaml", "mapping")),
        ("config", None, ("config",)),
        ("config/config.yaml", "corpora:\n\tmine: 3\n", ("config/config.yaml", "line 2")),
    ],
)
def test_a_file_that_is_no_configuration_is_named_with_its_line(name, text, words, fresh):
    """Before Snakemake reads it, whose message names neither."""
    (fresh.root / "mine.yaml").write_text("{}")
    if text:
        (fresh.root / name).write_text(text)
    command = [sys.executable, "-m", "snakemake", "-n", "--configfile", name, "corpus"]
    done = subprocess.run(command, cwd=fresh.root, env=fresh.environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.count("tokenscale: ") == 1 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    "typed, read",
    [
        ("--configfile mine.yaml corpus", "corpus --configfile mine.yaml"),
        ("-n --configfile a.yaml b.yml runs tables -j all", "runs tables -n --configfile a.yaml b.yml -j unlimited"),
        ("--configfiles a.json results/runs/x/done.json", "results/runs/x/done.json --configfiles a.json"),
        ("--configfile nope", "--configfile nope"),  # a missing file is none of the targets
        ("--config scale=demo report", "report --config scale=demo"),
        ("--configfile a.yaml -- runs", "--configfile a.yaml -- runs"),
        ("-jall", "-junlimited"),
        ("--jobs=all all", "--jobs=unlimited all"),
        ("--jobs all", "--jobs unlimited"),
        ("-j 4 all", "-j 4 all"),
        ("-c all", "-c all"),
        ("--profile alps all", "--profile alps all"),
    ],
)
def test_a_command_line_is_read_as_people_type_it(typed, read):
    assert " ".join(snakemake_logger_plugin_tokenscale.correct(typed.split())[0]) == read


@pytest.mark.parametrize(
    "words, near", [(["--profile", "alp"], "alps"), (["--profile=alps-debg"], "alps-debug"), (["--profile", "x"], None)]
)
def test_an_unknown_profile_is_refused_before_snakemake_reads_it(words, near, fresh):
    command = [sys.executable, "-m", "snakemake", *words, "-n"]
    done = subprocess.run(command, cwd=fresh.root, env=fresh.environment, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no such profile" in done.stderr and "Traceback" not in done.stderr
    assert near is None or f"did you mean {near}?" in done.stderr


@pytest.mark.parametrize("files", ["gone.txt", ["gone/*.parquet"], "empty.txt"])
def test_a_source_without_files_is_a_line_of_the_plan(files, fresh, monkeypatch, capfd):
    (fresh.root / "empty.txt").write_text("")
    config({"corpus": "own", "corpora": {"own": {"source": {"files": files}}}})(fresh.root)
    code, text = said_by("tokenscale plan ways --configfile mine.yaml", fresh, monkeypatch, capfd)
    assert code == 0 and "missing: corpus own: " in text and "corpora.own.source.files" in text


def test_a_target_may_stand_behind_the_configuration_file(fresh):
    config({"experiments": ["ranks"]})(fresh.root)
    said = fresh.command("-n", "--quiet", "host", "-j", "all", "--configfile", "mine.yaml", "corpus")
    assert "build_corpus" in said and "train" not in said


@pytest.mark.parametrize("wrong", ["question: [", "questin: what?\n", "question: ?\nruns: {model: lama}\n"])
def test_an_experiment_that_does_not_fit_stops_no_other_target(wrong, fresh):
    """It is listed by its name, and refused where it is asked for."""
    (fresh.root / "config/experiments/other.yaml").write_text(wrong)
    done = fresh.snakemake("ways", "-n", "--quiet", "host")
    assert "experiments are left out" in done.stdout and "experiments  other\n" in done.stdout
    for target in ("other", "all_experiments"):
        done = fresh.snakemake(target, "-n", check=False)
        assert done.returncode == 2 and "config/experiments/other.yaml" in done.stdout


def test_renaming_an_experiment_repeats_no_measurement(fresh):
    """Its benchmark has the same file under either name, as its runs have; another measurement has another."""
    before = measured(fresh, "ways")
    assert len(before) == 1
    (fresh.root / "config/experiments/ways.yaml").rename(fresh.root / "config/experiments/paths.yaml")
    config({"experiments": ["paths"]})(fresh.root)
    assert measured(fresh, "paths", "--configfile", "mine.yaml") == before
    changed = EXPERIMENTS["ways"]["data_benchmark"] | {"settings": {"sequence_length": 32, "rounds": 3}}
    (fresh.root / "config/experiments/paths.yaml").write_text(
        json.dumps(EXPERIMENTS["ways"] | {"data_benchmark": changed})
    )
    assert measured(fresh, "paths", "--configfile", "mine.yaml") != before


def measured(project: Project, *arguments: str) -> set[str]:
    """Files of benchmarks that a dry run names."""
    text = project.snakemake(*arguments, "-n", "--workflow-profile", "none").stdout
    return set(re.findall(r"results/benchmarks/data/[^ ,;]+\.json", text))


# ------------------------------------------------------------------------------------------------------------ flags


def parsers() -> list[argparse.ArgumentParser]:
    """The parser of every command and sub-command."""
    found = []
    for verb in cli.COMMANDS:
        parser = cli.Parser(prog=verb)
        importlib.import_module(f"tokenscale.cli.{verb}").add_arguments(parser)
        inner = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        found += [kind for choices in inner for kind in choices.values()] or [parser]
    return found


@pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.prog)
def test_an_unknown_flag_gets_the_nearest_spelling(parser, capsys):
    """Of every flag with a letter doubled; also before a required flag that is missing, which is the same one."""
    with contextlib.suppress(SystemExit):
        parser.parse_known_args([])  # which adds the options of a benchmark
    capsys.readouterr()
    flags = [a.option_strings[-1] for a in parser._actions if a.option_strings and a.help != argparse.SUPPRESS]
    for flag in flags:
        wrong = f"--{flag[2]}{flag[2:]}"
        if wrong in parser._option_string_actions:
            continue
        with pytest.raises(SystemExit, match="^2$"):
            parser.parse_args([wrong, "1"])
        said = capsys.readouterr().err
        assert said.startswith(f"tokenscale: unknown flag {wrong}.") and f"did you mean {flag}?" in said, said


# ------------------------------------------------------------------------------------------------------------ tables

DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "zeroed pages": lambda path: path.write_bytes(b"PAR1" + bytes(996) + path.read_bytes()[1000:]),
    "empty": lambda path: path.write_bytes(b""),
    "a web page": lambda path: path.write_bytes(PAGE),
    "another table": lambda path: path.write_bytes(path.with_name("stores.parquet").read_bytes()),
    "a missing column": lambda path: pq.write_table(pq.read_table(path).drop_columns(["run_id"]), path),
    "a wrong type": lambda path: pq.write_table(with_text(pq.read_table(path)), path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}


def with_text(table: pa.Table) -> pa.Table:
    """The table with every column as words."""
    return pa.table({name: ["many"] * len(table) for name in table.column_names})


@pytest.fixture(scope="module")
def tables_folder(tmp_path_factory) -> Path:
    """An experiment's tables."""
    folder = tmp_path_factory.mktemp("tables") / "results/tables/demo"
    steps = tables.steps("a", 2000, loss_sum=lambda step, _: 60.0 + math.sin(step))
    return tables.write(
        folder, {"experiment": "demo", "scale": "demo"}, runs=[tables.run("a", steps_asked=2000)], steps=steps
    )


@pytest.mark.parametrize("table", ["runs", "steps"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_table_is_named_with_the_command_that_restores_it(
    table, damage, tables_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = Path("results/tables/demo")
    shutil.copytree(tables_folder, folder)
    damage(folder / f"{table}.parquet")
    arguments = ["report", "figure", "loss_over_time", "--tables", folder, "--output", "o"]
    told = refused(capsys, arguments, untouched=tmp_path)
    assert f"{folder}/{table}.parquet" in told
    remove = f"rm -r {folder}/{table}.parquet && " if (folder / f"{table}.parquet").is_dir() else ""
    assert re.search(f"next +{remove}snakemake -f results/tables/demo/runs.parquet", told)


def test_a_figures_path_may_have_an_ending(tables_folder, tmp_path):
    for name in ("plain", "svg.svg", "table.csv"):
        arguments = ["report", "figure", "loss_over_time", "--tables", tables_folder, "--output", tmp_path / name]
        assert cli.main([str(argument) for argument in arguments]) == 0
    expected = {f"{name}.{kind}" for name in ("plain", "svg", "table") for kind in KINDS}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_status_outside_of_a_project_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["--failed"], ["--stale"], ["--json"]):
        assert str(tmp_path) in refused(capsys, ["status", *arguments], untouched=tmp_path)
