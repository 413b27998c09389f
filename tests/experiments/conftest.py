"""Fixtures that experiments share with the tests of stores and of workflows."""

from tests.unit.conftest import lab, small_parts
from tests.workflow.conftest import built, copy, fresh

__all__ = ["built", "copy", "fresh", "lab", "small_parts"]
