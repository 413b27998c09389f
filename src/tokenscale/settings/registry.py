"""Names in settings → dotted names of modules. Strings, so that nothing is imported until it is asked for.

This file is left out of every job's code: a job counts the modules that it uses, which are passed by name. A new entry
therefore reruns nothing.
"""

#: source kind → the module that reads it (a dotted name, so that a corpus depends on its own source only)
SOURCES = {
    "docstrings": "tokenscale.corpus.docstrings",
    "files": "tokenscale.corpus.files",
    "url": "tokenscale.corpus.fetched",
    "hub": "tokenscale.corpus.fetched",
    "dummy": "tokenscale.corpus.dummy",
    "grammar": "tokenscale.corpus.grammar",
}
#: source kind → the module that brings its files (apart, so that a corpus does not depend on how they came)
DOWNLOADS = {"url": "tokenscale.corpus.url", "hub": "tokenscale.corpus.hub"}
#: tokenizer kind → the module that makes and loads it
TOKENIZERS = {
    "tekken": "tokenscale.tokenizer.tekken",
    "huggingface": "tokenscale.tokenizer.huggingface",
    "bpe": "tokenscale.tokenizer.bpe",
    "numbers": "tokenscale.tokenizer.numbers",
}
#: format → the module with its writer and its reader
FORMATS = {
    "padded": "tokenscale.formats.padded",
    "token-list": "tokenscale.formats.token_list",
    "packed": "tokenscale.formats.packed",
    "archive": "tokenscale.formats.archive",
}
#: format of others → the module that reads and writes it
FOREIGN = {
    "megatron": "tokenscale.formats.foreign.megatron",
    "nanogpt": "tokenscale.formats.foreign.nanogpt",
    "hf-datasets": "tokenscale.formats.foreign.hf_datasets",
}
#: approach → the module that makes its batches (dotted, so that a run depends on its own approach only)
BATCHES = {
    "padded": "tokenscale.batches.padded",
    "padding-free": "tokenscale.batches.padding_free",
    "pretokenized-padded": "tokenscale.batches.pretokenized_padded",
    "token-list": "tokenscale.batches.token_list",
    "length-bucketed": "tokenscale.batches.length_bucketed",
    "packed": "tokenscale.batches.packed",
}
#: objective → the module that makes its batches of those of any approach, where they are not trained on as they are
OBJECTIVES = {"masked": "tokenscale.batches.masked"}
#: choice of labels → the module that makes them, where not all count
LABELS = {"target": "tokenscale.batches.target"}
#: what a model is built with where it is not the project's own decoder → the module that builds it
MODELS = {"transformers": "tokenscale.models.library"}
#: a method that a layout is made of → the module that applies it
PARALLEL = {
    "single": "tokenscale.parallel.single",
    "ddp": "tokenscale.parallel.data",
    "zero1": "tokenscale.parallel.zero1",
    "fsdp": "tokenscale.parallel.fully_sharded",
    "hsdp": "tokenscale.parallel.fully_sharded",
    "tp": "tokenscale.parallel.tensor",
    "pp": "tokenscale.parallel.pipeline",
}
#: figure → the module that draws it (see report/registry.py)
FIGURES = {
    "tokens_per_second_comparison": "tokenscale.report.drawings.tokens_per_second_comparison",
    "data_stall_share": "tokenscale.report.drawings.data_stall_share",
    "tokenization_benchmark": "tokenscale.report.drawings.tokenization_benchmark",
    "loss_over_time": "tokenscale.report.drawings.loss_over_time",
    "scaling_throughput": "tokenscale.report.drawings.scaling_throughput",
    "mfu_comparison": "tokenscale.report.drawings.mfu_comparison",
    "tflops_comparison": "tokenscale.report.drawings.tflops_comparison",
    "efficiency_comparison": "tokenscale.report.drawings.efficiency_comparison",
    "total_training_time": "tokenscale.report.drawings.total_training_time",
    "padding_share": "tokenscale.report.drawings.padding_share",
    "storage_against_entropy": "tokenscale.report.drawings.storage_against_entropy",
    "storage_benchmark": "tokenscale.report.drawings.storage_benchmark",
    "scaling_weak": "tokenscale.report.drawings.scaling_weak",
    "scaling_mfu": "tokenscale.report.drawings.scaling_mfu",
    "training_time": "tokenscale.report.drawings.training_time",
    "tokens_per_second": "tokenscale.report.drawings.tokens_per_second",
    "time_to_target_loss": "tokenscale.report.drawings.time_to_target_loss",
    "tokens_per_second_over_time": "tokenscale.report.drawings.tokens_per_second_over_time",
    "mfu_over_time": "tokenscale.report.drawings.mfu_over_time",
    "split_loss_curves": "tokenscale.report.drawings.split_loss_curves",
    "batch_size_comparison": "tokenscale.report.drawings.batch_size_comparison",
    "step_time_breakdown": "tokenscale.report.drawings.step_time_breakdown",
    "ddp_verification_loss": "tokenscale.report.drawings.ddp_verification_loss",
    "memory_by_method": "tokenscale.report.drawings.memory_by_method",
    "pipeline_vs_model_parallel": "tokenscale.report.drawings.pipeline_vs_model_parallel",
    "scaling_model": "tokenscale.report.drawings.scaling_model",
    "parallel_methods": "tokenscale.report.drawings.parallel_methods",
    "pipeline_bubble": "tokenscale.report.drawings.pipeline_bubble",
    "translation": "tokenscale.report.drawings.translation",
}
