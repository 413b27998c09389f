import json

import pandas as pd
import pytest

from tests.corpora import pairs_source
from tests.workflow.jobs import changed
from tokenscale.analysis.queries import query
from tokenscale.cli.verify import verify_results
from tokenscale.data.order.permutation import MODULUS
from tokenscale.settings.options import to_dict

pytestmark = [pytest.mark.experiment, pytest.mark.workflow, pytest.mark.slow(40)]

CORPORA = {
    "text": {"source": {"kind": "docstrings", "packages": ["pydoc_data"], "maximum_documents": 60}},
    "pairs": {"source": to_dict(pairs_source(80))},
}
MIXTURES = {
    "mixed": {"weights": {"text": 3, "pairs": 1}, "maximum_repetitions": 5},
    "staged": {
        "stages": [{"tokens": 640, "weights": {"text": 1}}, {"weights": {"text": 1, "pairs": 1}}],
        "maximum_repetitions": None,
    },
}
RUNS = {
    "tokenizer": "bpe",
    "model": "llama-micro",
    "sequence_length": 32,
    "global_batch": 6,
    "micro_batch": 3,
    "eos": True,
    "budget": {"steps": 8},
    "schedule": {"warmup_steps": 2},
    "validation": {"rows": 4, "every": 4},
    "device": "cpu",
}
#: which mixture is trained on how, on how many ranks; unit/test_mixtures.py compares all approaches
CELLS = [["mixed", "padding-free", 2], ["mixed", "token-list", 1], ["staged", "packed", 2]]
EXPERIMENT = {
    "question": "Do mixtures train on the same data in every approach and at every world size?",
    "runs": RUNS,
    "factors": {"corpus, approach, layout.data": CELLS},
    "figures": ["mixture_losses"],
}
OPTIONS = ["--configfile", "own.yaml"]


def write_config(project, **mixtures):
    tokenizers = {"bpe": {"kind": "bpe", "corpus": "text", "vocabulary_size": 300}}
    config = {
        "corpora": CORPORA,
        "tokenizers": tokenizers,
        "mixtures": MIXTURES | mixtures,
        "experiments": ["mixing"],
    }
    (project.root / "own.yaml").write_text(json.dumps(config))


@pytest.mark.long
def test_mixtures_are_planned_trained_and_reported(fresh):
    write_config(fresh)
    (fresh.root / "config/experiments/mixing.yaml").write_text(json.dumps(EXPERIMENT))
    data = {
        "build_corpus": 2,
        "build_tokenizer": 1,
        "pretokenize": 8,
        "mix_corpora": 1,
        "corpus_records": 2,
    }
    assert fresh.planned("runs", *OPTIONS) == data | {"mix_stores": 5, "train": 3}
    fresh.snakemake("--cores", "2", "results/figures/mixing/mixture_losses.svg", *OPTIONS)
    assert "Nothing to be done" in fresh.dry_run(
        "results/figures/mixing/mixture_losses.svg", *OPTIONS
    )

    tables = fresh.root / "results/tables/mixing"
    runs = query("inventory", tables)
    assert (runs["validity"] == "valid").all() and len(runs) == 3
    losses = query("source_validation", tables)
    last = losses[losses["last"]]
    assert set(last["source"]) == {"text", "pairs"} and len(losses) == 3 * 2 * 3 and len(last) == 6
    shares = last.groupby(["corpus", "source"])["share"].first()
    assert shares["mixed", "text"] == 0.75
    # 20 sequences, then half of 28
    assert shares["staged", "text"] == pytest.approx((20 + 14) / 48, abs=1e-6)
    # streams that tokenize while training, on two ranks, and stored ones on one rank
    for _, group in last[last["corpus"] == "mixed"].groupby("source"):
        assert group["approach"].nunique() == 2 and group["loss"].max() - group["loss"].min() < 1e-5
    steps = pd.read_parquet(tables / "steps.parquet").merge(
        runs[["run_id", "approach", "corpus"]], on="run_id"
    )
    digests = steps.groupby(["corpus", "approach", "step"])["order_digest"].sum() % MODULUS
    assert digests["mixed", "padding-free"].tolist() == digests["mixed", "token-list"].tolist()
    assert digests["staged", "packed"].nunique() == 8
    logged = query("validation", tables).set_index(["run_id", "step"])
    for (run_id, step), of_run in losses.groupby(["run_id", "step"]):
        total = (of_run["loss"] * of_run["validation_tokens"]).sum() / of_run[
            "validation_tokens"
        ].sum()
        assert logged.loc[(run_id, step), "loss"] == pytest.approx(total, rel=1e-12)

    found, counts = verify_results(fresh.root / "results")
    assert not [finding for finding in found if not finding.note] and counts["mixtures"] == 5
    with changed(fresh.root / "results/tokens/pairs/bpe/token-list-eos=true/manifest.json"):
        found, _ = verify_results(fresh.root / "results")
        assert sum("built again with other content" in finding.what for finding in found) == 1
        assert fresh.planned("runs", *OPTIONS)["mix_stores"] == 1

    # other weights are other runs of the same stores, and no other run
    write_config(fresh, mixed={"weights": {"text": 1, "pairs": 1}, "maximum_repetitions": 5})
    assert fresh.planned("runs", *OPTIONS) == {"train": 2}
