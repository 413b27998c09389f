"""Golden results that need no training: `make golden-test`, after `make run`.

Layouts, figures and evidence are compared where they are computed anyway: distributed/test_parity.py,
experiments/test_figures.py and unit/test_report_evidence.py.
"""

import pytest

from tests import golden


def test_ids_of_all_runs():
    golden.compare("run_ids", golden.list_run_ids())


def test_demo():
    golden.compare("demo", golden.describe_demo(golden.ROOT / "results"))


@pytest.mark.parametrize(
    "old, new, lines",
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.0]}, []),
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.5]}, ["/a: "]),
        ({"a": 1, "b": 2}, {"b": 2, "c": 3}, ["/a: gone", "/c: new"]),
        ({"a": [1]}, {"a": [1, 2]}, ["/a: [1] → [1, 2]"]),
        ({"a": [1.0]}, {"a": [1.0000001]}, []),
        ({"a": [1.0]}, {"a": [1.000001]}, ["/a: "]),
        ({"a": [1.0, 2.0]}, {"a": [1.0, float("nan")]}, ["/a: diverged"]),
        ({"a": ["x"]}, {"a": ["y"]}, ["/a[0]: x → y"]),
    ],
)
def test_a_difference_is_one_line(old, new, lines):
    found = golden.list_differences(old, new, golden.ROUNDING)
    assert len(found) == len(lines) and all(map(str.startswith, found, lines))
