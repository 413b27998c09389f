"""The SLURM plugin still has the defects for which it has a part of our executor to replace. A test
that fails says that a release has one mended: that part can go.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflow.conftest import ROOT

pytestmark = [pytest.mark.slow(150), pytest.mark.long]
SCRIPTS = ROOT / "evidence/slurm-plugin"
WAITS_FOR_EVER = "exit code 137"


@pytest.mark.parametrize(
    ("script", "arguments", "seen", "part"),
    [
        ("state.sh", (), WAITS_FOR_EVER, "first_word"),
        ("state.sh", ("PREEMPTED",), WAITS_FOR_EVER, "CampaignExecutor._has_failed"),
        ("silence.sh", (), WAITS_FOR_EVER, "CampaignExecutor.check_active_jobs"),
        ("outage.sh", (), "outputs: 0", "CampaignExecutor.run_job"),
    ],
)
def test_the_plugin_still_needs(script, arguments, seen, part, tmp_path):
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [SCRIPTS / script, *arguments],
        env=os.environ | {"PATH": commands, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert seen in done.stdout, f"mended: remove executor.{part}\n{done.stdout}"
