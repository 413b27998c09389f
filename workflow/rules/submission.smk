"""Checks before the first job is submitted, and the last lines of a call."""

import atexit

from tokenscale.cli.snakemake.checks import CallChecks

checks = CallChecks(workflow, settings, call)


onstart:
    # exit through Snakemake, which unlocks the folder
    with internals.exit_on_error():
        checks.start()


if IS_MAIN_PROCESS:
    atexit.register(checks.end)
