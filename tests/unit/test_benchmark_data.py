"""The data benchmark: checked before timed, counted like for like, complete in its record."""

import json

import numpy as np
import pytest

from tests.corpora import Lab, texts_around
from tokenscale.benchmark import data
from tokenscale.cli import main
from tokenscale.errors import UserError
from tokenscale.settings.benchmark import DataBenchmarkSettings
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.run import APPROACHES

T = 16


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"), texts_around(T) * 3, vocabulary_size=262)
    for store in ("padded", "packed"):
        lab.store(StoreSettings(store, sequence_length=T))
    lab.store(StoreSettings("token-list"))
    return lab


def arguments(lab, output):
    settings = json.dumps({"sequence_length": T, "rows": 3, "batches": 4, "rounds": 2})
    return [
        "benchmark", "data", "--settings", settings, "--corpus", str(lab.corpus / "manifest.json"),
        "--tokenizer", str(lab.tokenizer / "manifest.json"), "--stores", str(lab.directory / "tokens"),
        "--output", str(output),
    ]  # fmt: skip


def test_every_arm_runs_in_every_round(lab, tmp_path, capsys):
    assert main(arguments(lab, tmp_path / "out.json")) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    found = sorted((r["round"], r["arm"]) for r in result["records"])
    assert found == sorted((n, arm) for n in range(2) for arm in [*APPROACHES, "memcpy"])
    for record in result["records"]:
        assert record["batches"] == len(record["batch_s"]) == 4 and record["total_tokens"] == 4 * 3 * T
        assert 0 < record["useful_tokens"] <= record["total_tokens"]
        assert record["seconds"] == pytest.approx(sum(record["batch_s"]))
    assert result["settings"] == {"sequence_length": T, "rows": 3, "batches": 4, "rounds": 2}
    printed = capsys.readouterr().out
    assert all(f"\n{arm} " in printed for arm in [*APPROACHES, "memcpy"])
    assert result["cache"] == "warm" and result["schema"] == 1 and "numpy" in result["versions"]


def test_pairs_count_alike(lab, tmp_path):
    main(arguments(lab, tmp_path / "out.json"))
    useful = {r["arm"]: r["useful_tokens"] for r in json.loads((tmp_path / "out.json").read_text())["records"]}
    assert useful["padded"] == useful["pretokenized-padded"] and useful["padding-free"] == useful["token-list"]


def test_nothing_is_timed_where_a_pair_differs(lab, tmp_path, monkeypatch):
    from tokenscale.formats.padded import PaddedStore

    rows = PaddedStore.rows

    def wrong(self, indices):
        tokens, labels = rows(self, indices)
        return tokens + (np.arange(tokens.shape[1]) == 3), labels

    monkeypatch.setattr(PaddedStore, "rows", wrong)
    monkeypatch.setattr(data, "_round", lambda *a: pytest.fail("timed"))
    settings = DataBenchmarkSettings(sequence_length=T, rows=2, batches=2, rounds=1)
    with pytest.raises(UserError, match="different batches"):
        data.measure(settings, lab.corpus, lab.tokenizer, lab.directory / "tokens", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_a_missing_store_is_a_users_error(lab, tmp_path, capsys):
    found = arguments(lab, tmp_path / "out.json")
    found[found.index("--stores") + 1] = str(tmp_path)
    assert main(found) == 2
    assert "snakemake -f" in capsys.readouterr().err
