"""Compare golden losses of two commits: rounding or real, and of what kind? docs/other-trainers.md explains
the kinds.

Exit code 0: identical, rounding or declared. 1: a change that is real, or cannot be told from a
real one. 2: bad input.
"""

from tokenscale.base.errors import UserError

try:
    from tokenscale_golden.command import add_arguments, run
except ModuleNotFoundError as error:
    raise UserError(
        "the package tokenscale-golden is not installed.",
        reason=error,
        next="pip install packages/golden, in a clone of tokenscale",
    ) from None

__all__ = ["add_arguments", "run"]
