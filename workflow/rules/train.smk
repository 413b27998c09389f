rule arm:
    """Environment and source of another trainer, built where Snakemake runs: jobs of a cluster may have no network.

    Declares only its record, which also names a failure to build them.
    """
    input:
        files=lambda w: list_arm_files(w.arm),
        versions="locks/constraints.txt",
        code=code("tokenscale.cli.arm"),
    output:
        "results/arms/{arm}/environment.json",
    log:
        "results/logs/arms/{arm}.log",
    priority: DATA_PRIORITY
    localrule: True
    message:
        "environment of {wildcards.arm}"
    shell:
        "python -m tokenscale arm {wildcards.arm:q} --output {output:q} > {log:q} 2>&1"


rule train:
    """Train one run on all its ranks. Declares only done.json, written from the sealed record; logs are never declared."""
    input:
        unpack(lambda w: targets.run_inputs(w.run_id)),
        code=run_code,
    output:
        "results/runs/{run_id}/done.json",
    log:
        "results/logs/train/{run_id}.log",
    wildcard_constraints:
        # the form of an id: with every id listed, Snakemake would search all runs once for each run
        run_id=r"[^/]+-w[0-9]+-[0-9a-f]{10}",
    priority: lambda w: 10_000 - targets.runs[w.run_id].position
    threads: ALL_CORES
    resources:
        machine=TIMING_LOCK,
        # Our own srun starts the job's ranks: with `mpi` the SLURM plugin leaves that to the rule.
        mpi="srun",
        nodes=lambda w: nodes_of(w).nodes,
        tasks_per_node=lambda w: nodes_of(w).tasks_per_node,
        cpus_per_task=lambda w: nodes_of(w).cores_per_task(
            settings.machine.cores_per_rank
        ),
        ranks=world_size,
        mem_mb=settings.machine.memory_mb,
        runtime=job_minutes,
        # per node: SLURM may split six GPUs of a job into four on one node and two on the next
        gres=lambda w: f"gpu:{nodes_of(w).ranks_per_node}",
        slurm_extra=settings.machine.slurm_options,
        site=settings.settings.machine or "",
        # how many such runs a node has at once: their jobs are submitted as one
        share=lambda w: targets.runs[w.run_id].count_places(settings.machine),
    params:
        run=lambda w: targets.arguments(run=targets.run_of(w.run_id).to_json()),
    message:
        "train {wildcards.run_id} (ranks: {resources.ranks}, nodes: {resources.nodes})"
    shell:
        "python -m tokenscale launch {params.run:q} --site {resources.site:q} --share {resources.share}"
        " --output {output:q} --corpus {input.corpus:q} --tokenizer {input.tokenizer:q} --store {input.store:q}"
        " --validation-store {input.validation_store:q} --arm {input.arm:q} > {log:q} 2>&1"


rule record:
    """Record the first steps of a run, and two repetitions moved by rounding, for its parity certificates."""
    input:
        unpack(lambda w: targets.run_inputs(w.run_id)),
        code=code("tokenscale.cli.arm_record", "tokenscale.arms.own"),
    output:
        "results/parity/{run_id}/outcome.json",
    log:
        "results/logs/parity/{run_id}.log",
    wildcard_constraints:
        run_id=r"[^/]+-w[0-9]+-[0-9a-f]{10}",
    threads: 2
    resources:
        # like a training on one rank: on a cluster our own srun starts it on a GPU, in the container of trainings
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
        run=lambda w: targets.arguments(run=targets.run_of(w.run_id).to_json()),
    message:
        "record {wildcards.run_id} for its certificates"
    shell:
        "python -m tokenscale arm_record {params.run:q} --store {input.store:q} --arm {input.arm:q}"
        " --site {resources.site:q} --output {output:q} > {log:q} 2>&1"


rule certificate:
    """Compare the recordings of two trainers. Where there is no verdict, the certificate says why."""
    input:
        of="results/parity/{run_id}/outcome.json",
        over="results/parity/{over}/outcome.json",
        code=code("tokenscale.cli.parity"),
    output:
        "results/parity/{run_id}/over/{over}.json",
    log:
        "results/logs/parity/{run_id}-{over}.log",
    wildcard_constraints:
        run_id=r"[^/]+-w[0-9]+-[0-9a-f]{10}",
        over=r"[^/]+-w[0-9]+-[0-9a-f]{10}",
    threads: 2
    params:
        folders=lambda w, input: [
            os.path.dirname(path) for path in (input.over, input.of)
        ],
    message:
        "parity certificate of {wildcards.run_id} over {wildcards.over}"
    shell:
        "python -m tokenscale parity {params.folders:q} --always --output {output:q} > {log:q} 2>&1"
