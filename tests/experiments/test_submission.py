import json
import os
import re
import shutil

import pytest

from tests.machines import program, write_image_record
from tests.workflow import forked
from tests.workflow.conftest import EXPERIMENTS, RUNS
from tokenscale.runs.records.provenance import count_gpus

pytestmark = [pytest.mark.experiment, pytest.mark.slow(60), pytest.mark.workflow]

#: refuses every job, so that a controller ends at once; the call has been written down before
SBATCH = '#!/bin/sh\necho "$@" >> "$SUBMITTED"\necho refused >&2\nexit 1\n'
#: jobs are asked after at once, and none is tried again
IMPATIENT = ["--retries", "0", "--slurm-init-seconds-before-status-checks", "1"]
SILENT = "#!/bin/sh\nexit 0\n"
#: what profiles/alps/install.py writes last
RECORD = ".venv-alps/image.json"


def write(project, name, **changes):
    (project.root / f"config/experiments/{name}.yaml").write_text(
        json.dumps(EXPERIMENTS["ways"] | changes)
    )


@pytest.fixture
def cluster(fresh):
    return equip(fresh)


@pytest.fixture
def made(copy):
    """The same, of which all but the trainings is there, so that they are the first to be
    submitted.
    """
    for name in ("runs", "tables"):
        shutil.rmtree(copy.root / "results" / name)
    return equip(copy)


def equip(project):
    """A project at scale alps whose experiment `ways` needs many node-hours, and `ranks` few."""
    commands = project.root.parent / "commands"
    commands.mkdir()
    for name in ("sbatch", "sacctmgr", "sshare", "sacct", "squeue", "scancel", "sinfo"):
        (commands / name).write_text(SBATCH if name == "sbatch" else SILENT)
        (commands / name).chmod(0o755)
    program(commands, "id", "echo users g1")
    write_image_record(project.root / RECORD)
    dear = RUNS | {
        "model": {"preset": "llama-8b-nemo"},
        "budget": {"steps": 2_000_000},
        "sequence_length": 2048,
    }
    write(project, "ways", runs=dear, storage_benchmark=None)
    write(
        project,
        "ranks",
        runs=RUNS | {"approach": "packed"},
        factors={"layout.data": [1, 2]},
        storage_benchmark=None,
    )
    return project


def submit(project, *arguments, account="g1"):
    """(exit code, what is said, sbatch's calls) of `snakemake --profile alps`."""
    calls = project.root.parent / "submitted"
    environment = project.environment | {"SUBMITTED": str(calls)}
    environment["PATH"] = f"{project.root.parent / 'commands'}{os.pathsep}{environment['PATH']}"
    environment.pop("ALPS_ACCOUNT", None)
    if account:
        environment["ALPS_ACCOUNT"] = account
    code, text = forked.snakemake(
        ["--profile", "alps", *IMPATIENT, *arguments], project.root, environment
    )
    return code, text, calls.read_text().splitlines() if calls.exists() else []


def refusals(text):
    return re.findall(r"^tokenscale: .*", text, re.MULTILINE)


def refuse(project, *arguments, **options):
    """What is said of a call that submits nothing: one message, and no lock is left."""
    code, text, calls = submit(project, *arguments, **options)
    assert (code, calls) == (2, []) and len(refusals(text)) == 1 and "Traceback" not in text, text
    assert not list((project.root / ".snakemake/locks").glob("*"))
    return text


def test_a_plan_over_the_budget_is_refused_before_anything_is_submitted(cluster):
    text = refuse(cluster)
    assert re.search(r"largest +ways +[0-9,.]+\n", text) and "budget={node_hours: " in text


@pytest.mark.skipif(count_gpus() > 0, reason="a machine with a GPU starts such trainings")
def test_trainings_sized_for_gpus_do_not_start_on_a_cpu(cluster):
    code, text = forked.snakemake(["ways"], cluster.root, cluster.environment)
    assert code == 2 and "Traceback" not in text, text
    assert "budget={cpu_hours: " in text and len(refusals(text)) == 1
    assert not list((cluster.root / "results").glob("runs/*"))
    code, text = forked.snakemake(["-n", "ways"], cluster.root, cluster.environment)
    assert code == 0 and "the trainings are sized for GPUs" in text, text


def test_only_what_would_run_counts_and_a_larger_budget_lets_it_through(cluster):
    code, text, calls = submit(cluster, "ranks")
    assert calls and not refusals(text) and code == 1, text
    assert all(" -A g1 " in f"{call} " for call in calls), calls
    larger = cluster.root / "larger.yaml"
    larger.write_text("budget: {node_hours: 1000000}\n")
    before = len(calls)
    code, text, calls = submit(cluster, "--configfile", str(larger))
    assert len(calls) > before and not refusals(text), text


def test_runs_that_the_image_cannot_run_are_not_submitted(cluster):
    file = cluster.root / "profiles/alps/machine.toml"
    file.write_text(file.read_text().replace('"safetensors", ', ""))
    assert re.search(
        r"runs +safetensors: packed-llama-micro-\S+, packed-llama-micro-\S+\n",
        refuse(cluster, "ranks"),
    )


def test_trainings_without_the_packages_of_their_image_are_not_submitted(cluster):
    (cluster.root / RECORD).unlink()
    assert "profiles/alps/prepare.sh" in refuse(cluster, "ranks")


def test_an_account_without_a_value_stops_before_the_first_submission(cluster):
    assert "export ALPS_ACCOUNT=<project>" in refuse(cluster, "ranks", account=None)


def test_what_the_cluster_does_not_offer_is_refused_before_the_first_submission(cluster):
    assert "g9 is none of your groups" in refuse(cluster, "ranks", account="g9")
    commands = cluster.root.parent / "commands"
    program(commands, "sinfo", "echo 'normal*|gpu:4|6:00:00|288|870000'")
    text = refuse(cluster, "ranks")
    assert "asks for 720, and the partition normal has 360" in text
    program(commands, "sinfo", "exit 0")
    machine = cluster.root / "profiles/alps/machine.toml"
    purged = f'purged_days = {{"{cluster.root}" = 0}}\n'
    machine.write_text(re.sub(r"purged_days = .*\n", purged, machine.read_text()))
    assert "results is purged before the plan ends" in refuse(cluster, "ranks")


def test_an_option_that_takes_the_profiles_account_away_is_refused(cluster):
    """SLURM would charge the account that it takes by itself, and give the partition's own time
    limit.
    """
    text = refuse(cluster, "--default-resources", "slurm_partition=debug", "--", "ranks")
    assert re.search(
        r"lost +default-resources: slurm_account, runtime, nodes, local_cores, constraint\n", text
    )
    _, text, calls = submit(cluster, "--set-resources", "train:runtime=5", "--", "ranks")
    assert calls and not refusals(text), "it takes nothing of what is submitted away"


def limits(calls):
    """Time limits, in minutes, of the trainings among sbatch's calls."""
    return [
        int(minutes)
        for call in calls
        if "rule_train" in call
        for minutes in re.findall(r" -t (\d+) ", call)
    ]


def test_a_job_asks_for_as_long_as_its_estimate_says_unless_the_profile_says_more(made):
    """Two runs of seconds: 30 minutes each, where the machine's limit is 12 hours."""
    _, text, calls = submit(made, "--keep-going", "--", "ranks")
    assert limits(calls) == [30, 30], (text, calls)
    with (made.root / "profiles/alps/config.yaml").open("a") as file:
        file.write("set-resources: {train: {runtime: 99}}\n")
    _, text, calls = submit(made, "--keep-going", "--", "ranks")
    assert limits(calls)[2:] == [99, 99], calls


def test_a_job_asks_for_the_nodes_cores_and_gpus_of_its_ranks(made):
    """Two tasks where there is one rank, as the plugin wants it. Six GPUs are three on each of two
    nodes.
    """
    runs = RUNS | {"approach": "packed", "global_batch": 48}
    write(made, "ranks", runs=runs, factors={"layout.data": [1, 2, 6, 16]}, storage_benchmark=None)
    _, text, calls = submit(made, "--keep-going", "--", "ranks")
    options = (
        r"--nodes=(\d+) .*--ntasks-per-node=(\d+) --cpus-per-task=(\d+) --signal=USR1@300 "
        r".*--gres=gpu:(\d+)"
    )
    asked = [
        tuple(map(int, re.search(options, call).groups())) for call in calls if "rule_train" in call
    ]
    assert sorted(asked) == [(1, 2, 36, 1), (1, 2, 72, 2), (2, 3, 72, 3), (4, 4, 72, 4)], (
        text,
        calls,
    )


def test_a_dry_run_warns_and_goes_on(cluster):
    code, text, calls = submit(cluster, "-n", account=None)
    assert (code, calls) == (0, []), text
    *_, end = text.partition("\nnot ready: ")
    assert all(word in end for word in ("ways, ranks at scale alps", "ALPS_ACCOUNT", "node-hours"))
    assert re.search(
        r"^cost of 5 trainings, estimated: [0-9,.]+ node-hours, over the budget of 50 ",
        text,
        re.MULTILINE,
    )
    code, text, _ = submit(cluster, "-n", "ranks")
    assert code == 0 and not refusals(text) and "budget allows" not in text
    assert re.search(
        r"cost of 2 trainings, estimated: 0.\d+ node-hours, within the budget of 50 \(budget", text
    ), text
    assert re.search(r"^  ranks +0\.\d+  2 runs$", text, re.MULTILINE) and "≤" not in text


def test_jobs_that_run_here_need_no_account(cluster):
    """The corpus is built on the machine that Snakemake runs on, and is all that is asked for."""
    # a resource that only a cluster reads has no value
    cluster.snakemake(
        "--cores", "1", "--default-resources", "slurm_account=$NOBODY_SET_THIS", "--", "corpus"
    )
    assert (cluster.root / "results/corpus/small/manifest.json").exists()
    assert not refusals(
        cluster.command("-n", "--cores", "1", "--quiet", "host", "--config", "scale=alps")
    )
    text = (cluster.root / "workflow/rules/corpus.smk").read_text()
    (cluster.root / "workflow/rules/corpus.smk").write_text(
        text.replace("rule build_corpus:", "localrules: build_corpus\n\n\nrule build_corpus:")
    )
    code, text, calls = submit(cluster, "-n", "corpus", account=None)
    assert code == 0 and not refusals(text), text


def test_an_experiment_without_an_overlay_is_left_out_of_all_and_refused_by_its_name(cluster):
    """Its runs are a laptop's, and would take GPU nodes."""
    write(cluster, "ways", runs=RUNS, storage_benchmark=None, scales={})
    (cluster.root / "small.yaml").write_text("experiments: [ranks]\n")
    figure = "results/figures/ways/loss_over_time.svg"
    code, text, _ = submit(cluster, "-n", "--configfile", "small.yaml", "--", figure)
    assert code == 2 and refusals(text) == [
        "tokenscale: the experiment ways has no settings for scale alps."
    ], text
    # also where the configuration's report is of an experiment that the scale does not have
    for config in (["--configfile", "small.yaml"], []):
        code, text, _ = submit(cluster, "-n", *config, "--", "all_experiments")
        said = ["tokenscale: left out of all_experiments (no overlay for scale alps): ways"]
        assert code == 0 and refusals(text) == said and "train ways" not in text, text
    code, text, _ = submit(cluster, "-n", "tables")
    assert code == 2 and "ways has no settings for scale alps" in text, "named in the configuration"
