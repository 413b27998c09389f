import json
import shutil

import pytest

from tests.workflow.conftest import CLAIMS
from tests.workflow.jobs import BOTH, changed
from tokenscale.base.files import canonical_json

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20), pytest.mark.workflow]


def runs_of(project, experiment):
    table = json.loads((project.root / f"results/experiments/{experiment}/runs.json").read_text())
    return [run["run_id"] for run in table["runs"]]


def test_report_now_is_of_the_sealed_runs_and_names_the_others(copy):
    """One of three runs failed, one of another experiment is missing, code of all trainings has
    changed.
    """
    failed = next(run for run in runs_of(copy, "ways") if run.startswith("padding-free"))
    folder = copy.root / "results/runs" / failed
    (folder / "done.json").unlink()
    record = json.loads((folder / "run.json").read_text())
    record["outcome"] = {"status": "failed", "exit_code": 1}
    (folder / "run.json").write_text(
        canonical_json({k: v for k, v in record.items() if k != "seal"})
    )
    missing = next(run for run in runs_of(copy, "ranks") if "-w2-" in run)
    shutil.rmtree(copy.root / "results/runs" / missing)
    with changed(copy.root / "src/tokenscale/train/loop.py"):
        assert copy.planned("report")["train"] == 4
        planned = copy.planned("report_now")
        assert planned == BOTH
        copy.snakemake("--cores", "2", "report_now")
        assert copy.planned("report_now") == {}
    assert not (folder / "done.json").exists()
    ways, ranks = (
        (copy.root / f"results/report/{name}.html").read_text() for name in ("ways", "ranks")
    )
    assert failed in ways and "2 of 3 runs" in ways and "invalid" in ways
    assert missing in ranks and '<span class="badge missing">missing</span>' in ranks
    back = copy.planned("report")
    assert back["train"] == 2 and back["ingest"] == 2, "what was left out comes in again"


@pytest.mark.long
def test_a_report_of_nothing_says_so(fresh):
    """No store, no benchmark, no run: every page is there, and nothing was made but the report."""
    fresh.snakemake("--cores", "2", "report_now")
    text = (fresh.root / "results/report/index.html").read_text()
    assert "none tested" in text and 'href="claims.json"' in text
    assert (
        not (fresh.root / "results/runs").exists() and not (fresh.root / "results/tokens").exists()
    )


def test_claims_are_printed_and_strict_where_a_sentence_is_relied_on(copy):
    done = copy.snakemake("--cores", "1", "claims")
    assert "supported  packs  Of packed rows" in done.stdout
    ledger = json.loads(json.dumps(CLAIMS))
    ledger["claims"]["packs"]["direction"] = "above"
    (copy.root / "config/claims.yaml").write_text(json.dumps(ledger))
    assert copy.planned("claims") == {"judge_claims": 1}
    printed = copy.snakemake("--cores", "1", "claims").stdout
    assert "contradicted  packs" in printed, printed
    strict = copy.snakemake("--cores", "1", "claims", "--config", "strict_claims=true", check=False)
    assert strict.returncode == 1 and "a sentence no longer holds: packs" in strict.stdout
    assert copy.planned() == {"build_page": 1, "build_pdf": 1, "build_bundle": 1}


def test_the_source_studies_have_a_report_of_their_own(copy):
    assert "A paper" in (copy.root / "results/report/index.html").read_text()
    made = {"judge_claims": 1, "build_page": 1, "build_pdf": 1, "build_bundle": 1}
    assert copy.planned("replication") == made | {"replication": 1}
    copy.snakemake("--cores", "1", "replication")
    folder = copy.root / "results/replication"
    page = (folder / "index.html").read_text()
    assert 'id="claim-packs"' in page and "Do the ways from text to rows differ?" in page
    assert "Do two ranks compute what one computes?" not in page, "no claim asks it"
    assert "build_page" not in copy.planned("replication") and copy.planned() == {}
    (copy.root / "config/replication.yaml").write_text(json.dumps({"documents": {}, "claims": {}}))
    done = copy.snakemake("-n", "replication", check=False)
    assert done.returncode == 2 and "no experiment can test a claim" in done.stdout
    assert copy.planned() == {}


def test_a_ledger_that_is_not_there_is_named(fresh):
    (fresh.root / "config/claims.yaml").unlink()
    done = fresh.snakemake("-n", "claims", check=False)
    assert done.returncode != 0 and "config/claims.yaml" in done.stdout
