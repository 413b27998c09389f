"""Adapter between Snakemake and the package: the configuration, and the inputs and parameters that rules share."""

import gc
import math
import os
import re
from functools import cache, partial

from tokenscale.arms.environments import list_arms, list_files as list_arm_files
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.cli import cloud
from tokenscale.cli.snakemake import internals
from tokenscale.cli.snakemake.targets import (
    JUDGED,
    RECORDED,
    TABLES,
    Targets,
    part_manifest,
)
from tokenscale.runs.launch import lock
from tokenscale.settings import profile as profiles
from tokenscale.settings.closure import ONLINE, training_modules, write_listing
from tokenscale.settings.config import ALL, Config
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.layout import geometry
from tokenscale.settings.manifests import (
    corpus_manifest,
    corpus_records,
    store_manifest,
    tokenizer_manifest,
)
from tokenscale.settings.options import EXTENSION_NAME
from tokenscale.settings.registry import (
    ALIASES,
    BATCHES,
    FIGURES,
    FORMATS,
    OWN_FIGURE,
    SOURCES,
    TOKENIZERS,
    figure_module,
)

lock.use_this_python()
# Exclude imported modules from garbage collection, which the thousands of runs below would trigger repeatedly.
gc.freeze()

with internals.exit_on_error():
    IS_MAIN_PROCESS = internals.is_main_process(workflow)
    REQUESTED = internals.get_targets() if IS_MAIN_PROCESS else []
# `report_now` reports the existing runs: rules that train or build data are left out, and missing files are no inputs.
# Which rules there are must be known before Snakemake plans.
REPORT_ONLY = "report_now" in REQUESTED

with internals.exit_on_error():
    if IS_MAIN_PROCESS:
        internals.record_jobs(workflow)
        internals.check_executor_plugin()
        from tokenscale.cli.snakemake.executor import install_executor

        install_executor()
    call = profiles.parse_call(
        internals.get_command_line(),
        os.environ,
        *internals.get_configuration(workflow),
    )
    config.update(profiles.find_dropped_values(call.config, call.profile))
    settings = Config(config, layers=call.layers())
    if IS_MAIN_PROCESS and settings.machine.starter == "srun":
        internals.use_cores_of_nodes(workflow, settings.machine.cores_per_node)
    targets = internals.ExitOnError(
        Targets(settings, existing_only=REPORT_ONLY, job_runs=internals.get_job_runs())
    )
    # With another corpus, the experiments name tokenizers that are trained on it.
    if IS_MAIN_PROCESS or settings.settings.corpus is not None:
        targets.expand()
    calls_jobs = IS_MAIN_PROCESS and lock.enter_workflow(
        internals.get_command_line()[1:]
    )
    if calls_jobs:
        targets.write_index(needed=settings.machine.starter == "srun")
    if calls_jobs and REPORT_ONLY and settings.settings.bucket is not None:
        internals.print_after_log(f"tokenscale: {cloud.pull(settings, targets.chosen)}")
if IS_MAIN_PROCESS and settings.broken_experiments:
    what = "experiments are left out: their files do not match the settings."
    names = ", ".join(settings.broken_experiments)
    note = UserError(what, experiments=names, next="tokenscale plan NAME shows why")
    internals.print_after_log(note.render())

# Timed rules hold `machine`, of which profiles/default has one: on this machine two of them never run at a time.
TIMING_LOCK = 0 if settings.machine.starter == "srun" else 1
# More threads than any machine has: a timed rule uses every core of its machine.
ALL_CORES = 1024
# A part of a corpus or a store: megabytes, and minutes at most.
PART_MB = 3000
PART_MINUTES = 60
# of what runs read: else a run whose data is there overtakes those planned before it (settings/experiments.py: order_runs)
DATA_PRIORITY = 20_000


def one_of(names):
    """Return a regular expression for these names, so that an unknown name is a missing rule, not a failing function."""
    return "|".join(re.escape(name) for name in sorted(names)) or "(?!)"


def stores_of(formats):
    """Return a regular expression for the names of stores of these formats."""
    return rf"({formats})(-[a-z_]+=[a-z0-9]+)*" if formats else "(?!)"


# Corpora that are built in parts, and the formats whose stores are then written in parts.
PART_RANGES = targets.part_ranges()
IN_PARTS = set().union(*PART_RANGES.values())
WRITTEN_IN_PARTS = "|".join(name for name, form in FORMATS.items() if form.splittable)
WRITTEN_WHOLE = "|".join(
    [
        *(name for name, form in FORMATS.items() if not form.splittable),
        EXTENSION_NAME.pattern,
    ]
)
ALL_FORMATS = "|".join([*FORMATS, EXTENSION_NAME.pattern])


# Counts for local rules, not for submitted jobs (see profiles/alps).
resource_scopes:
    local_cores="local",


wildcard_constraints:
    corpus=one_of(settings.corpora),
    mixture=one_of(settings.mixtures),
    arm=one_of(list_arms()),
    tokenizer=one_of(settings.tokenizers),
    experiment=one_of(targets.experiments),
    figure="|".join([one_of([*FIGURES, *ALIASES]), OWN_FIGURE.pattern]),
    report=one_of(targets.reports),


# Return the input `code` of a job with these modules as roots (see `settings/closure.py`).
code = internals.exit_on_error()(write_listing)


def code_of(command, *variants):
    return code(f"tokenscale.cli.{command}", *variants)


def tokenizer_module(tokenizer):
    return TOKENIZERS[settings.tokenizers[tokenizer].kind].module


def run_code(w):
    return code(*training_modules(targets.run_of(w.run_id)))


def world_size(w):
    return targets.run_of(w.run_id).layout.world_size


def nodes_of(w):
    return geometry(world_size(w), settings.machine.gpus_per_node)


def memory_mb(needed):
    """Return the memory that a job requests: what it needs, or all of a node that it has for itself."""
    return settings.machine.memory_mb if settings.machine.exclusive else needed


def parts_at_a_time(parts):
    """Return how many of these parts a job builds at a time: on a cluster, what a node has cores and memory for."""
    if settings.machine.starter != "srun":
        return len(parts)
    room = settings.machine.memory_mb // PART_MB
    return max(1, min(len(parts), settings.machine.cores_per_node, room))


def part_minutes(parts, threads):
    """Return the time limit of a job that builds parts, `threads` at a time. Parts that it does not reach are built next."""
    minutes = PART_MINUTES * math.ceil(len(parts) / threads)
    if settings.machine.starter != "srun":
        return minutes
    return min(minutes, settings.machine.minutes)


@cache
def run_prices():
    """Return the prices of runs. Imported only where jobs are submitted."""
    from tokenscale.cli.plan_prices import RunPrices

    return RunPrices(settings)


def job_minutes(w):
    """Return the time limit of a training's job: from its estimate under SLURM, otherwise the machine's."""
    if settings.machine.starter != "srun" or w.run_id not in targets.runs:
        return settings.machine.minutes
    return run_prices().time_limit_minutes(targets.runs[w.run_id])


def storage_benchmark(w):
    return targets.storage_benchmark_of(w.benchmark)


def files_of_experiment(w, name):
    if IS_MAIN_PROCESS and name == ALL and settings.left_out_note:
        internals.print_after_log(f"tokenscale: {settings.left_out_note}")
    return targets.experiment_files(name)
