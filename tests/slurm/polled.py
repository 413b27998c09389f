"""`snakemake` as it is shipped, except that it looks after jobs of SLURM every second: python tests/slurm/polled.py …

The executor waits longer after each look at which no job had ended, and as long once more before it ends itself: right
for a cluster that many use, and most of the time of a test. Here no wait is longer than `SECONDS` in the environment.
"""

import os
import sys

#: the variable that holds the longest time between two looks, in seconds
SECONDS = "TOKENSCALE_SLURM_POLL_S"


def cap(executor: type, seconds: float) -> None:
    """Executors of this class wait at most so long between two looks, whatever they set themselves."""
    shipped = executor.next_seconds_between_status_checks
    executor.next_seconds_between_status_checks = property(
        lambda self: min(shipped.fget(self), seconds), shipped.fset, doc=shipped.__doc__
    )


def main() -> None:
    from snakemake.cli import main as snakemake
    from snakemake_executor_plugin_slurm import Executor

    cap(Executor, float(os.environ.get(SECONDS, "1")))
    sys.argv[0] = "snakemake"
    snakemake()


if __name__ == "__main__":
    main()
