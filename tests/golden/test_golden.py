"""Golden results that need no training: `make golden-test`, after `make run`.

Layouts, figures and evidence are compared where they are computed anyway:
distributed/test_parity.py, experiments/test_figures.py and unit/test_report_evidence.py.
"""

import pytest

from tests import golden
from tokenscale.settings.config import load_config
from tokenscale.settings.experiments import SCALES


def test_ids_of_all_runs():
    """Scale → experiment → ids of its runs, in the order of the run table."""
    found = {}
    for scale in SCALES:
        config = load_config("config/config.yaml", root=golden.ROOT, overrides={"scale": scale})
        found[scale] = {
            name: [run.run_id for run in config.runs(name)] for name in sorted(config.at_scale)
        }
    golden.compare("run_ids", found)


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
