"""Checks that take long or need the package registry: `make long-test`. Each writes a dated log."""

from pathlib import Path

LOGS = Path(__file__).parents[2] / "evidence/long-tests"
