"""All figures by name. Not part of any job's code: a rule names the file of its figure (`settings/registry.py`)."""

from tokenscale.base.errors import unknown
from tokenscale.report.drawings import (
    by_approach,
    inference,
    loss_over_time,
    over_time,
    parallel_methods,
    pipeline,
    scaling,
    scaling_model,
    storage,
    tokenization_benchmark,
    validation,
)
from tokenscale.report.figure import Figure
from tokenscale.settings.registry import ALIASES

FIGURES: dict[str, type[Figure]] = {
    "tokens_per_second_comparison": by_approach.TokensPerSecondComparison,
    "data_stall_share": by_approach.DataStallShare,
    "padding_share": by_approach.PaddingShare,
    "batch_size_comparison": by_approach.BatchSizeComparison,
    "tokenization_benchmark": tokenization_benchmark.TokenizationBenchmark,
    "loss_over_time": loss_over_time.LossOverTime,
    "ddp_verification_loss": loss_over_time.DdpVerificationLoss,
    "scaling_throughput": scaling.ScalingThroughput,
    "mfu_comparison": scaling.MfuComparison,
    "scaling_weak": scaling.ScalingWeak,
    "training_time": scaling.TrainingTime,
    "storage_against_entropy": storage.StorageAgainstEntropy,
    "storage_benchmark": storage.StorageBenchmark,
    "inference_tokens_per_second": inference.InferenceTokensPerSecond,
    "time_to_target_loss": validation.TimeToTargetLoss,
    "translation": validation.Translation,
    "mixture_losses": validation.MixtureLosses,
    "tokens_per_second_over_time": over_time.TokensPerSecondOverTime,
    "step_time_breakdown": over_time.StepTimeBreakdown,
    "memory_by_method": parallel_methods.MemoryByMethod,
    "frameworks": parallel_methods.Frameworks,
    "parallel_methods": parallel_methods.ParallelMethods,
    "pipeline_bubble": pipeline.PipelineBubble,
    "scaling_model": scaling_model.ScalingModel,
}


def figure_class(name: str) -> type[Figure]:
    """Return the class of a figure or of an alias. Raises UserError for a name that is none."""
    if (kept := ALIASES.get(name, name)) not in FIGURES:
        raise unknown("figure", name, (*FIGURES, *ALIASES))
    return FIGURES[kept]
