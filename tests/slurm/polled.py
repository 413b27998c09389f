"""`snakemake` as it is shipped, except that it looks after jobs of SLURM every second: python
tests/slurm/polled.py …

The executor waits longer after each look at which no job had ended, and as long once more before it
ends itself: right for a cluster that many use, and most of the time of a test.
"""

import sys


def main() -> None:
    from snakemake.cli import main as snakemake
    from snakemake_executor_plugin_slurm import Executor

    shipped = Executor.next_seconds_between_status_checks
    Executor.next_seconds_between_status_checks = property(
        lambda self: min(shipped.fget(self), 1), shipped.fset
    )
    sys.argv[0] = "snakemake"
    snakemake()


if __name__ == "__main__":
    main()
