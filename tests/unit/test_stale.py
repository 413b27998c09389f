"""What would rerun, and why: what people read of a dry run's jobs and reasons."""

import json
from pathlib import Path

import pytest

from tokenscale.base.files import sha256_text, write_arguments, write_json, write_text
from tokenscale.cli.snakemake.jobs import Job, list_planned_jobs, read_failed_jobs, split_reasons
from tokenscale.cli.snakemake.reasons import describe_changed_settings, find_causes, render
from tokenscale.settings.closure import PACKAGE
from tokenscale.settings.profile import Call

TOKEN_LIST = str(PACKAGE / "data/stores/write_parquet.py")
DECODER = str(PACKAGE / "train/models/decoder.py")
LOG = "results/logs/x.log"
RUN = "results/runs/token-list-llama-tiny-single-w1-d0ff57e1f3/done.json"
WIDE = "results/runs/packed-llama-tiny-ddp-w4-08ffaea4c0/done.json"
STORE = "results/tokens/web/bpe/token-list/manifest.json"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A project where jobs ran with one listing of their source files and have another one now."""
    monkeypatch.chdir(tmp_path)
    list_ = "tokenscale/data/stores/write_parquet.py"
    decoder = "tokenscale/train/models/decoder.py"
    before = {list_: "0", decoder: "0", "tokenscale/train/models/build.py": "0"}
    for name, edited in {"list": [list_], "decoder": [decoder], "both": [list_, decoder]}.items():
        now = before | dict.fromkeys(edited, "1")
        text = json.dumps({"files": before})
        listing = Path(code(name))
        write_json(listing, {"files": now})
        write_text(listing.with_name(f"{sha256_text(text)}.json"), text)
        record = {
            "log": [LOG],
            "input_checksums": {code(name): f"sha256:{sha256_text(text)}", STORE: "sha256:0"},
        }
        write_json(f".snakemake/metadata/{name}", record)
    return tmp_path


def code(name):
    return f"results/code/{name}/sources.json"


def job(rule, output, reason):
    return Job(rule, tuple(output), (LOG,), split_reasons(reason))


def store(reason):
    return job("pretokenize", [STORE], reason)


def train(reason, output=RUN):
    return job("train", [output], reason)


def tables(reason):
    return job(
        "ingest", ["results/tables/ways/runs.parquet", "results/tables/ways/steps.parquet"], reason
    )


def figure(reason):
    files = [f"results/figures/ways/loss_over_time.{kind}" for kind in ("svg", "csv")]
    return job("draw_figure", files, reason)


UPSTREAM = "Input files updated by another job: "
PAGE = job(
    "build_page",
    ["results/report/index.html"],
    f"{UPSTREAM}results/figures/ways/loss_over_time.svg",
)


def way(*first):
    """A dry run of store → run → tables → figure → report, the store with this reason."""
    return [
        *first,
        train(UPSTREAM + STORE),
        tables(f"{UPSTREAM}{RUN}, results/experiments/ways/runs.json"),
        figure(f"{UPSTREAM}results/tables/ways/runs.parquet, results/tables/ways/steps.parquet"),
        PAGE,
    ]


def told(*jobs, targets=(), call=Call()):  # noqa: B008
    return render(list(jobs), list(targets), call)


def test_every_job_is_read_with_its_kind_and_name_and_targets_are_not(tmp_path):
    file = tmp_path / "events.jsonl"
    event = {
        "event": "job_info",
        "jobid": 4,
        "log": [LOG],
        "message": "",
        "slurm": None,
        "reason": f"{UPSTREAM}x",
    }
    outputs = [[STORE], [RUN], ["results/figures/ways/loss_over_time.svg"], ["elsewhere.txt"], []]
    events = [event | {"rule": f"rule{n}", "output": output} for n, output in enumerate(outputs)]
    jobs = list_planned_jobs(events)
    assert [(j.kind, j.name) for j in jobs] == [
        ("store", "web/bpe/token-list"),
        ("run", "token-list-llama-tiny-single-w1-d0ff57e1f3"),
        ("figure", "loss_over_time of ways"),
        ("job", "rule3"),
    ]
    assert jobs[0].reasons == {"upstream": "x"} and jobs[0].logs == (LOG,)
    lines = [json.dumps(event | {"event": "job_error"}) for event in events]
    # a killed process left the last line incomplete
    write_text(file, "\n".join([*lines, '{"event": "job_']))
    assert [job.rule for job in read_failed_jobs(file)] == ["rule4"], (
        "the last attempt of each job counts"
    )


def test_an_edited_file_is_named_with_what_it_hits_and_what_follows():
    for path, seconds in ((RUN, 600), (WIDE, 3600)):
        record = {"started_unix_s": 5.0, "outcome": {"ended_unix_s": 5.0 + seconds}}
        write_json(Path(path).with_name("run.json"), record)
    text = told(
        *way(
            store(f"Updated input files: {code('list')}"),
            train(f"Updated input files: {code('decoder')}", WIDE),
        )
    )
    assert text.splitlines()[:5] == [
        "2 runs, 1 store and 3 other jobs would run.",
        (
            "trainings: 1 on 1 rank, 1 on 4 ranks; last time took 1 h 10 min, 4 h 10 min over all "
            "ranks"
        ),
        "",
        f"code      {TOKEN_LIST} changed",
        "            store web/bpe/token-list",
    ]
    both = f"Updated input files: {code('both')}"
    (cause,) = find_causes([train(both), train(both, WIDE)])
    assert (cause.text, len(cause.jobs)) == (f"{TOKEN_LIST} and {DECODER} changed", 2)
    text = told(*way(store(f"Updated input files: {code('list')}")), call=Call(profile="alps"))
    assert "1 run would start only because data is rebuilt" in text
    assert "         -> 1 run, tables of ways, 1 figure of ways and report\n" in text
    assert f"    snakemake --profile alps {STORE}\n" in text
    assert "--consider-ancient" not in text, "the run's own code is not edited"


def test_an_edit_of_a_trainings_code_can_be_accepted():
    text = told(train(f"Updated input files: {code('decoder')}"), targets=["ways"])
    assert "snakemake ways --consider-ancient train=code" in text
    assert "snakemake ways --touch" in text
    assert "only because data is rebuilt" not in text
    missing = figure("Missing output files: results/figures/a/b.svg")
    text = told(train(f"Updated input files: {code('decoder')}"), missing)
    assert "--consider-ancient" in text and "--touch" not in text, "where something is missing"


def test_code_is_told_without_names_where_nobody_knows_what_the_job_ran_with(folder):
    edited = train(f"Updated input files: {code('decoder')}")
    for path in (folder / "results/code/decoder").glob("?" * 64 + ".json"):
        path.unlink()
    assert "\ncode      one of its source files changed\n" in told(edited)
    (folder / ".snakemake/metadata/decoder").write_text("no JSON")
    assert "\ncode      one of its source files changed\n" in told(edited)


@pytest.mark.parametrize(
    "before, now, words",
    [
        ("""'{"a":{"b":1}}'""", """'{"a":{"b":2}}'""", "a.b: 1 → 2"),
        (
            """'{"name":"x"}'""",
            """'{"cleaning":{"nfc":true},"name":"x"}'""",
            "cleaning.nfc: default → true",
        ),
        (f"""'{"0" * 64}','{{"seed":1}}'""", f"""'{{"seed":2}}','{"1" * 64}'""", "seed: 1 → 2"),
        (f"'{'0' * 64}'", f"'{'1' * 64}'", "its content, compared by hash"),
        ("<nothing exclusive>", "'ranks'", "nothing → ranks"),
        ("not python", "'x'", "not python → x"),
        (
            "'" + json.dumps(dict.fromkeys("abcdef", 1)) + "'",
            "'" + json.dumps(dict.fromkeys("abcdef", 2)) + "'",
            "a: 1 → 2, b: 1 → 2, c: 1 → 2, 3 more",
        ),
    ],
)
def test_a_setting_is_told_with_its_values_before_and_now(before, now, words):
    text = (
        f"Union of exclusive params before and now across all output: before: {before} now: {now} "
    )
    assert describe_changed_settings(text) == words


CHANGED = "Set of input files has changed since last execution"


def test_other_reasons_are_told_by_their_kind():
    absent = store(f"Missing output files: {STORE}")
    assert "\nnew       not built yet\n" in told(absent)
    write_text(LOG, "it ran once")
    for job, said in (
        (absent, f"missing   {STORE} (removed, or its job failed)"),
        (train(f"Updated input files: {STORE}"), f"data      {STORE} changed"),
        (tables(CHANGED), "inputs    its set of input files changed"),
        (tables("The moon is full"), "other     The moon is full"),
    ):
        assert f"\n{said}\n" in told(job)
    assert "inputs" not in told(
        train(f"Missing output files: {RUN}"), tables(f"{UPSTREAM}{RUN}; {CHANGED}")
    )
    text = f"Missing output files: {RUN}; {UPSTREAM}{STORE}; {CHANGED}"
    assert split_reasons(text) == {"missing": RUN, "upstream": STORE, "inputs": ""}


def test_settings_in_files_of_arguments_are_compared_by_their_content():
    files = [
        ["--run", '{"seed":1}'],
        ["--run", '{"seed":2}'],
        ["--experiments", "a", "b"],
        ["--experiments", "a"],
    ]
    seed, other, two, one = (
        write_arguments(f"results/arguments/{n}.json", words) for n, words in enumerate(files)
    )
    assert describe_changed_settings(f"before: '{seed}' now: '{other}'") == "seed: 1 → 2"
    assert describe_changed_settings(f"before: '{two}' now: '{one}'") == "a, b → a"
    assert "by hash" in describe_changed_settings(
        "before: '@results/arguments/7.json' now: '@results/arguments/8.json'"
    )
