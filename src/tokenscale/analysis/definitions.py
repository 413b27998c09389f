"""Every query by its name, in the order in which their definitions are printed.

Whoever imports this may ask any of them, and so depends on all: a job's code is read off these names
(`settings/closure.py`).
"""

QUERIES = (
    "steps_global",
    "throughput",
    "computing",
    "epochs",
    "padding",
    "loss",
    "loss_curves",
    "validation",
    "source_validation",
    "translation",
    "time_to_target",
    "stalls",
    "storage",
    "benchmark",
    "storage_benchmark",
    "inference",
    "inference_steps",
    "generations",
    "scaling",
    "scaling_weak",
    "parallelism",
    "frameworks",
    "certificates",
    "pipeline",
    "memory",
    "order",
    "phases",
    "loss_difference",
    "step_times",
    "stragglers",
    "energy",
    "inventory",
)
