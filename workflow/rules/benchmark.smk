rule benchmark_storage:
    """Measure storage: write and read the same ids in every format, dtype, codec and row group, in interleaved rounds."""
    input:
        corpus=lambda w: corpus_manifest(storage_benchmark(w).corpus),
        tokenizer=lambda w: tokenizer_manifest(storage_benchmark(w).tokenizer),
        code=lambda w: code_of(
            "benchmark",
            "tokenscale.benchmark.storage",
            *(name for form in FORMATS.values() for name in form[:2]),
            tokenizer_module(storage_benchmark(w).tokenizer),
        ),
    output:
        "results/benchmarks/storage/{benchmark}.json",
    log:
        "results/logs/benchmark/storage-{benchmark}.log",
    wildcard_constraints:
        benchmark=r"[^/]+-[0-9a-f]{8}",
    threads: ALL_CORES
    resources:
        machine=TIMING_LOCK,
        mem_mb=memory_mb(8000),
    params:
        settings=lambda w: targets.settings(storage_benchmark(w).settings),
    message:
        "benchmark of tokens at rest, {wildcards.benchmark}"
    shell:
        "python -m tokenscale benchmark storage {params.settings:q} --corpus {input.corpus:q}"
        " --tokenizer {input.tokenizer:q} --output {output:q} > {log:q} 2>&1"


rule benchmark_inference:
    """Measure inference: trained models continue prompts; each length is timed with and without a cache, interleaved."""
    input:
        runs=lambda w: targets.run_files([w.experiment]),
        code=lambda w: code_of(
            "benchmark",
            "tokenscale.benchmark.inference",
            *targets.tokenizer_modules(w.experiment),
        ),
    output:
        "results/benchmarks/inference/{experiment}.json",
    log:
        "results/logs/benchmark/inference-{experiment}.log",
    threads: ALL_CORES
    resources:
        machine=TIMING_LOCK,
        # like a training on one rank: on a cluster our own srun starts it on a GPU
        mpi="srun",
        nodes=1,
        tasks_per_node=geometry(1, settings.machine.gpus_per_node).tasks_per_node,
        cpus_per_task=geometry(1, settings.machine.gpus_per_node).cores_per_task(
            settings.machine.cores_per_rank
        ),
        mem_mb=settings.machine.memory_mb,
        runtime=settings.machine.minutes,
        gres="gpu:1",
        site=settings.settings.machine or "",
    params:
        settings=lambda w: targets.settings(
            settings.experiment(w.experiment).inference_benchmark
        ),
        runs=lambda w, input: targets.arguments(
            run=[os.path.dirname(file) for file in input.runs]
        ),
    message:
        "benchmark of text from the models of {wildcards.experiment}"
    shell:
        "python -m tokenscale benchmark inference {params.settings:q} {params.runs:q}"
        " --site {resources.site:q} --output {output:q} > {log:q} 2>&1"
