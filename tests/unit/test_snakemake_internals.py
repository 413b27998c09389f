"""Private parts of Snakemake are used in one file, and a release without one of them is refused clearly."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenscale.base.errors import UserError
from tokenscale.cli import snakemake_internals as internals

ROOT = Path(__file__).parents[2]
RULES = [ROOT / "workflow/Snakefile", *sorted((ROOT / "workflow/rules").glob("*.smk"))]


class Job:
    def __init__(self, name, output=(), norun=False):
        self.rule, self.output, self.is_norun = SimpleNamespace(name=name), list(output), norun


def workflow_of(jobs, run, local=()):
    dag = SimpleNamespace(jobs=jobs, needrun_jobs=lambda exclude_finished: run)
    return SimpleNamespace(dag=dag, _localrules=set(local))


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_use_no_private_part_themselves(path):
    private = r"workflow\._|workflow\.dag|workflow\.scheduler|os\._exit|sys\.argv|from snakemake\.cli"
    assert re.findall(private, path.read_text()) == []


def test_jobs_to_submit_leave_out_local_rules_and_targets():
    train, figure, target = Job("train"), Job("figure"), Job("all", norun=True)
    workflow = workflow_of([train, figure, target], [train, figure, target], local=["figure"])
    assert internals.get_jobs_to_submit(workflow) == [train]


def test_a_release_without_a_part_is_refused_with_a_next_step():
    with pytest.raises(UserError, match="does not fit the workflow") as caught:
        internals.get_jobs_to_submit(SimpleNamespace())
    assert "_localrules" in caught.value.facts["found"] and "pip install" in caught.value.facts["next"]


def test_an_error_ends_the_process_with_2_and_no_stack_trace():
    code = "from tokenscale.cli import snakemake_internals as i; from tokenscale.base.errors import UserError\n"
    code += "try: i.exit_with(UserError('wrong.', next='mend'))\nexcept BaseException: print('caught')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "tokenscale: wrong.\n  next  mend\n")
