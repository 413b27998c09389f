"""Golden losses: is a change of a loss curve rounding or real, and of what kind? Needs NumPy only."""

from .reading import Curve, GoldenError, read  # noqa: F401
from .verdict import Verdict, judge  # noqa: F401
