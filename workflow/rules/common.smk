"""Adapter between Snakemake and the package: the workflow's settings and the files of each target."""

import gc
import os
import re
import shlex
import sys
from functools import cache
from pathlib import Path

from tokenscale.cli import cloud
from tokenscale.cli import snakemake_internals as internals
from tokenscale.data.corpus import fingerprint
from tokenscale.data.corpus.files import check_files
from tokenscale.arms.environments import list_arms, list_files as list_arm_files
from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import canonical_json, sha256_text, write_arguments
from tokenscale.runs.launch import lock
from tokenscale.runs.launch.lock import use_this_python
from tokenscale.settings import profile as profiles
from tokenscale.settings.closure import ONLINE, write_listing, training_modules
from tokenscale.settings.config import ALL, Config, list_benchmark_stores
from tokenscale.settings.run import parse_run_id
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.layout import geometry
from tokenscale.settings.claims import load_claims as read_ledger
from tokenscale.settings.manifests import (
    certificate_file,
    corpus_manifest,
    corpus_records,
    done_file,
    list_manifests,
    mixture_manifest,
    store_manifest,
    tokenizer_manifest,
)
from tokenscale.settings.options import to_dict
from tokenscale.settings.profile import find_dropped_values
from tokenscale.settings.yaml_files import read_yaml
from tokenscale.settings.registry import (
    ALIASES,
    BATCHES,
    FIGURES,
    FORMATS,
    SOURCES,
    TOKENIZERS,
)

use_this_python()
# `report_now` reports the existing runs: rules that train or build data are left out, and missing files are no inputs.
COMMAND_LINE = internals.get_command_line()
WORDS = COMMAND_LINE[1:]
NOW = "report_now" in WORDS
PARTS = ["corpus", "tokens", "train", "submission", "benchmark"] * (not NOW)
PARTS += ["analysis", "claims", "report"]
# Exclude imported modules from garbage collection, which the thousands of runs below would trigger repeatedly.
gc.freeze()


refuse = internals.exit_with


def is_requested(experiment):
    """Return whether the command line names an experiment, as a target or in the path of a file below results."""
    path = rf"results/(.*[/=])?{re.escape(experiment)}/"
    return any(word == experiment or re.match(path, word) for word in WORDS)


try:
    if workflow.is_main_process:
        internals.record_jobs(workflow)
    call = profiles.parse_call(
        COMMAND_LINE,
        os.environ,
        workflow.config_settings.configfiles,
        workflow.config_settings.config,
    )
    config.update(find_dropped_values(call.config, COMMAND_LINE, os.environ))
    settings = Config(config, layers=call.layers())
    # as a target on the command line, ALL selects all experiments for the report
    named = [ALL] if ALL in WORDS else []
    EXPERIMENTS = settings.select_experiments(named)
    USABLE = settings.usable([*EXPERIMENTS, *filter(is_requested, settings.available)])
    REPORT = settings.report_folder(named)
    # folder → experiments of each report that may be requested: each experiment has its own
    REPORTS = {settings.report_folder([e]): [e] for e in USABLE} | {REPORT: EXPERIMENTS}
    RUNS = settings.all_runs(USABLE)
    if workflow.is_main_process and NOW and settings.settings.bucket is not None:
        print(f"tokenscale: {cloud.pull(settings, EXPERIMENTS)}", file=sys.stderr)
except UserError as error:
    refuse(error)
if workflow.is_main_process and settings.broken_experiments:
    what = "experiments are left out: their files do not match the settings."
    names = ", ".join(settings.broken_experiments)
    hint = "python -m tokenscale plan NAME shows why"
    print(UserError(what, experiments=names, next=hint).render(), file=sys.stderr)
try:
    if workflow.is_main_process and lock.enter_workflow(WORDS):
        call.save()
except UserError as error:
    refuse(error)
if workflow.is_main_process and ALL in WORDS and settings.left_out_note:
    print(f"tokenscale: {settings.left_out_note}", file=sys.stderr, flush=True)

# Timed rules hold `machine`, of which profiles/default has one: on this machine two of them never run at a time.
THIS_MACHINE = 0 if settings.machine.starter == "srun" else 1
# More threads than any machine has: a timed rule uses every core of its machine.
ALL_CORES = 1024
# of what runs read: else a run whose data is there overtakes those planned before it (settings/experiments.py: order_runs)
BEFORE_RUNS = 20_000
TABLES = [
    f"{name}.parquet"
    for name in (
        "runs",
        "bleu",
        "attempts",
        "steps",
        "spans",
        "events",
        "quarantine",
        "benchmarks",
        "storage_benchmarks",
        "inference_benchmarks",
        "generations",
        "certificates",
        "stores",
    )
] + ["experiment.json", "manifest.json"]


def one_of(names):
    """Return a regular expression for these names, so that an unknown name is a missing rule, not a failing function."""
    return "|".join(re.escape(name) for name in sorted(names)) or "(?!)"


def stores_of(formats):
    """Return a regular expression for the names of stores of these formats."""
    return rf"({formats})(-[a-z_]+=[a-z0-9]+)*" if formats else "(?!)"


# Corpora that are built in parts, and the formats whose stores are then written in parts.
IN_PARTS = [name for name, corpus in settings.corpora.items() if corpus.parts > 1]
WRITTEN_IN_PARTS = "|".join(name for name, form in FORMATS.items() if form.splittable)
WRITTEN_WHOLE = "|".join(name for name, form in FORMATS.items() if not form.splittable)


# Experiments that request the same measurement share it, as they share runs, even under another name.
BENCHMARKS = {"data": {}, "storage": {}}
for name in USABLE:
    for kind, benchmark in settings.experiment(name).benchmarks.items():
        BENCHMARKS[kind][benchmark.id] = benchmark


wildcard_constraints:
    corpus=one_of(settings.corpora),
    mixture=one_of(settings.mixtures),
    arm=one_of(list_arms()),
    tokenizer=one_of(settings.tokenizers),
    part=r"\d{5}",
    experiment=one_of(USABLE),
    figure=one_of([*FIGURES, *ALIASES]),
    report=one_of(map(os.path.basename, REPORTS)),


def content_of(corpus, part=None):
    """Return the fingerprint of the source files of a corpus or a part: as a parameter, it shows Snakemake changes of
    large files.
    """
    try:
        return fingerprint.fingerprint_sources(
            settings.corpora[corpus], Path("results/corpus"), part
        )
    except UserError as error:
        refuse(error)


def part_manifests(folder, corpus):
    """Return the manifests of all parts of a corpus, or of one of its stores."""
    return [
        f"{folder}/parts/{number:05d}/manifest.json"
        for number in range(settings.corpora[corpus].parts)
    ]


def mixed_corpora(mixture, store=None):
    """Return the corpora of a mixture that runs read: in a validation store all, otherwise those with a weight."""
    mixture = settings.mixtures[mixture]
    held_out = store is not None and StoreSettings.parse(store).split == "validation"
    sources = mixture.sources if held_out else mixture.trained_sources
    return [source.corpus.name for source in sources]


@cache
def downloads_of(corpus):
    """Return the manifest of a corpus's download, if it has one. Refuses a corpus whose source files cannot be read."""
    found = settings.corpora[corpus]
    if workflow.is_main_process and found.source.kind == "files":
        try:
            check_files(found, Path("results/corpus"), settings.file_of)
        except UserError as error:
            refuse(error)
    downloaded = SOURCES[found.source.kind].downloaded
    return [f"results/downloads/{corpus}/manifest.json"] * downloaded


def tokenizer_sources(tokenizer):
    """Return the files of a tokenizer from a folder: changed files make another tokenizer."""
    files = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    folder = tokenizer.source or ""
    return [
        os.path.join(folder, name)
        for name in files
        if folder and os.path.isfile(os.path.join(folder, name))
    ]


def corpus_files():
    return [corpus_manifest(name) for name in settings.list_corpora(EXPERIMENTS)]


def token_files():
    """Return everything that runs read, so that they can then start in their planned order."""
    runs = [run.settings for e in EXPERIMENTS for run in settings.runs(e)]
    online = [run for run in runs if run.store is None]
    names = {run.tokenizer.name for run in runs}
    texts = {corpus.name for run in online for corpus in run.trained_corpora}
    return (
        [tokenizer_manifest(name) for name in sorted(names)]
        + [corpus_records(name) for name in sorted(texts)]
        + [store_manifest(*store) for store in settings.stores(EXPERIMENTS)]
    )


def existing(files):
    """Return the files, or only the existing ones for `report_now`."""
    return [file for file in files if os.path.isfile(file)] if NOW else files


def run_files(experiments):
    return existing([done_file(run_id) for run_id in settings.all_runs(experiments)])


def read_manifests(w):
    """Return the manifests of the stores and corpora that an experiment's runs read, for its tables."""
    return {
        "stores": existing(
            [store_manifest(*store) for store in settings.stores([w.experiment])]
        ),
        "corpora": existing(
            [corpus_manifest(name) for name in settings.list_corpora([w.experiment])]
        ),
    }


def external_files(experiment):
    """Return the records of other programs' runs in the experiment: their logs exist, no rule makes them."""
    return existing(
        [
            f"results/runs/{run['run_id']}/run.json"
            for run in settings.external(experiment)
        ]
    )


def table_files(experiments):
    return [f"results/tables/{e}/runs.parquet" for e in experiments]


def figure_files(experiments):
    return [
        f"results/figures/{e}/{f}.svg"
        for e in experiments
        for f in settings.experiment(e).figures
    ]


def read_claims():
    """Return the claims as plain values, after validating them."""
    try:
        read_ledger(settings.settings.claims)
        return read_yaml(settings.settings.claims)
    except UserError as error:
        refuse(error)


def experiments_of(w):
    return REPORTS[f"results/{w.report}"]


def tables_of(w):
    """Return all tables of a report's experiments."""
    return expand(
        "results/tables/{experiment}/{table}",
        experiment=experiments_of(w),
        table=TABLES,
    )


def page_files(report):
    """Return the first page, and one page per experiment if there are several."""
    pages = ["index", *(REPORTS[report] if len(REPORTS[report]) > 1 else [])]
    return [f"{report}/{page}.html" for page in pages]


def report_files(report):
    """Return all files of a report. Its figures are direct inputs: Snakemake then redraws a deleted one."""
    return [
        *page_files(report),
        f"{report}/report.pdf",
        f"{report}/SHA256SUMS",
        *figure_files(REPORTS[report]),
    ]


def print_reports():
    """Print where the reports of a call that has nothing left to do lie, with their answers and cautions."""
    if not internals.is_planned(workflow):
        return
    # a dry run counts its jobs as finished
    unfinished = internals.get_jobs_to_run(workflow, unfinished=not workflow.dryrun)
    for page in [] if unfinished else internals.find_outputs(workflow, "build_page"):
        log = Path("results/logs", Path(page).parent.name, "page.log")
        said = log.read_text(errors="replace") if log.is_file() else ""
        # the command's own lines begin with the page; what a library printed stands before them
        lines = said.partition(f"{page}\n")[2]
        print(f"report   {page}\n{lines}", end="", file=sys.stderr, flush=True)


def run_of(w):
    if w.run_id not in RUNS:
        near = find_nearest(w.run_id, RUNS)
        refuse(
            UserError(
                f"no experiment has a run {w.run_id}.",
                folder=settings.settings.experiments_folder,
                next=(
                    f"did you mean {near}?"
                    if near
                    else "python -m tokenscale plan lists the runs"
                ),
            )
        )
    return RUNS[w.run_id].settings


def run_inputs(w):
    """Manifests that a run reads: raw text and its records or a token store, the tokenizer, and the validation store."""
    run = run_of(w)
    named = list_manifests(run)
    roles = ("corpus", "tokenizer", "store", "validation_store", "arm")
    return {role: named.get(role, []) for role in roles} | {
        "records": [corpus_records(corpus.name) for corpus in run.trained_corpora]
        * (run.store is None),
        "resume_from": resumed_from(run),
    }


def resumed_from(run):
    """Return the file that provides the state a run resumes from: done.json of our own run, or another checkpoint."""
    if run.resume_from is None:
        return []
    writer = parse_run_id(run.resume_from)
    if writer in RUNS:
        return [done_file(writer)]
    return [os.path.join(run.resume_from, "checkpoint.json")]


def arguments(**options):
    """Return `@FILE`, which stands for these options of a command: lists and settings may exceed an argument's limit.

    The name is the content's hash, so that as a parameter it shows Snakemake other values.
    """
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    path = f"results/arguments/{sha256_text(canonical_json(words))[:16]}.json"
    try:
        return write_arguments(path, words)
    except OSError as error:
        refuse(
            UserError(
                "the arguments of a job cannot be written.",
                file=path,
                reason=error.strerror,
                next="make the folder results/arguments writable",
            )
        )


def settings_of(value):
    """Return `@FILE` for `--settings` with this settings object."""
    return arguments(settings=canonical_json(to_dict(value)))


def code(*modules):
    """Return the input `code` of a job with these modules as roots (see `settings/closure.py`)."""
    try:
        return write_listing(*modules)
    except UserError as error:
        refuse(error)


def code_of(command, *variants):
    return code(f"tokenscale.cli.{command}", *variants)


def run_code(w):
    return code(*training_modules(run_of(w)))


def world_size(w):
    return run_of(w).layout.world_size


def nodes_of(w):
    return geometry(world_size(w), settings.machine.gpus_per_node)


@cache
def run_prices():
    """Return the prices of runs. Imported only where jobs are submitted."""
    from tokenscale.cli.plan_prices import RunPrices

    return RunPrices(settings)


def job_minutes(w):
    """Return the time limit of a training's job: from its estimate under SLURM, otherwise the machine's."""
    if settings.machine.starter != "srun" or w.run_id not in RUNS:
        return settings.machine.minutes
    return run_prices().time_limit_minutes(RUNS[w.run_id])


def data_benchmark(w):
    return BENCHMARKS["data"][w.benchmark]


def storage_benchmark(w):
    return BENCHMARKS["storage"][w.benchmark]


def inference_code(w):
    """Return the code that opens and queries the models of an experiment's runs."""
    runs = [run.settings for run in settings.runs(w.experiment)]
    variants = {TOKENIZERS[run.tokenizer.kind].module for run in runs}
    return code_of("benchmark", "tokenscale.benchmark.inference", *sorted(variants))


def certificate_files(w):
    """Return the parity certificates of an experiment's comparisons of trainers."""
    pairs = settings.compared_trainers(w.experiment)
    return existing([certificate_file(*pair) for pair in pairs])


def benchmark_files(w):
    return existing(settings.experiment(w.experiment).benchmark_files(w.experiment))


def check_command_line():
    """Refuse targets that no rule makes, naming the nearest, and a call without cores. Called after all rules are defined."""
    if not workflow.is_main_process:
        return
    if (cores := workflow.resource_settings.cores) is not None and cores < 1:
        what = "--cores must be at least 1."  # Snakemake would wait forever
        refuse(UserError(what, flag="--cores", found=cores, next="--cores 2, or all"))
    for report in REPORTS:
        if os.path.lexists(report) and not os.path.isdir(report):
            what = "the report's folder is no folder."
            refuse(UserError(what, path=report, next=f"rm {shlex.quote(report)}"))
    made = {rule.name: rule for rule in workflow.rules}

    def is_known(word):
        # the report of another configuration may be there
        there = os.path.exists(word) and not word.startswith("results/report")
        return there or any(internals.find_rules(workflow, word))

    unknown = {word for word in WORDS if word[0:1] != "-" and not is_known(word)}
    if not unknown:
        return
    for target in internals.parse_targets(WORDS):
        if target in unknown:
            names = [name for name, rule in made.items() if not rule.has_wildcards()]
            near = find_nearest(target, files_of_all() if "/" in target else names)
            hint_list = "snakemake --list-target-rules lists the rules"
            hint = f"did you mean {near}?" if near else hint_list
            refuse(UserError("no rule makes this target.", target=target, next=hint))


def files_of_all():
    """Return the files of every experiment that may be requested by their paths."""
    found = [done_file(run_id) for run_id in RUNS] + table_files(settings.available)
    found += [corpus_manifest(name) for name in settings.corpora]
    found += [mixture_manifest(name) for name in settings.mixtures]
    found += [tokenizer_manifest(name) for name in settings.tokenizers]
    found += [store_manifest(*store) for store in settings.stores(EXPERIMENTS)]
    found += [
        f"results/figures/{e}/{f}.svg"
        for e in settings.available
        for f in [*FIGURES, *ALIASES]
    ]
    return found + [file for report in REPORTS for file in report_files(report)]
