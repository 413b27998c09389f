"""Pages that answer one document's questions: regenerated counterparts of reports once written by hand."""

from dataclasses import dataclass

from tokenscale.base.errors import unknown


@dataclass(frozen=True)
class View:
    """Some claims of the ledger, by their names, and the figures that bear on them, in this order."""

    title: str
    lead: str
    claims: tuple[str, ...]
    figures: tuple[str, ...]


VIEWS = {
    "report_pretokenization": View(
        "Does it pay to tokenize before training?",
        "The regenerated counterpart of a course project's report on pretokenization: its claims, and its figures from "
        "runs that are like for like.",
        (
            "isolated-speed-up",
            "padding-share",
            "ignored-share",
            "token-list-storage",
            "zstd-22-compression",
            "decompression-slows",
            "stored-padded-slower",
            "stored-padded-below-both",
            "slower-by-reading",
            "training-hardly-changes",
            "benefit-grows-with-batch",
            "computing-is-the-bottleneck",
            "padding-free-faster",
        ),
        (
            "tokenization_benchmark",
            "batch_size_comparison",
            "tokens_per_second_comparison",
            "mfu_comparison",
            "tflops_comparison",
            "tokens_per_second_over_time",
            "mfu_over_time",
            "loss_over_time",
            "data_stall_share",
            "step_time_breakdown",
            "padding_share",
            "storage_against_entropy",
            "storage_benchmark",
        ),
    ),
    "report_ddp": View(
        "What do more ranks gain?",
        "The regenerated counterpart of a course project's report on data parallelism: its claims, and its figures "
        "from runs that are like for like, with one process as the base.",
        (
            "ddp-efficiency",
            "ddp-efficiency-best",
            "near-linear",
            "stored-keeps-mfu",
            "compounding",
            "larger-worlds-converge-by-step",
            "larger-worlds-reach-the-target-sooner",
            "validation-loss-unchanged",
            "two-gpus",
            "ddp-96",
            "ddp-94",
        ),
        (
            "ddp_verification_loss",
            "scaling_throughput",
            "scaling_weak",
            "efficiency_comparison",
            "scaling_mfu",
            "time_to_target_loss",
            "split_loss_curves",
            "total_training_time",
            "training_time",
            "tokens_per_second",
            "scaling_model",
        ),
    ),
}
#: made by targets of their own, before or after the report's folder is filled
VIEW_FILES = tuple(f"{view}.{kind}" for view in VIEWS for kind in ("html", "pdf"))


def named(name: str) -> View:
    """A view by its name. Raises UserError for a name that is none."""
    if name not in VIEWS:
        raise unknown("view", name, VIEWS)
    return VIEWS[name]
