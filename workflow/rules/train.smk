# By the shape of a run's id: with every id spelled out, Snakemake searches a list of all runs once for each run.
RUN_ON_ONE_RANK = r"[^/]+-w1-[0-9a-f]{10}"
RUN_ON_MANY = r"[^/]+-w(?!1-)[0-9]+-[0-9a-f]{10}"


rule train_one:
    """One run on one process. Declares only done.json, written from the sealed record; logs are never declared."""
    input:
        unpack(run_inputs),
        code=run_code,
    output:
        "results/runs/{run_id}/done.json",
    log:
        "results/logs/train/{run_id}.log",
    wildcard_constraints:
        run_id=RUN_ON_ONE_RANK,
    priority: lambda w: 10_000 - RUNS[w.run_id].position
    threads: ALL_CORES
    resources:
        machine=1,
        nodes=1,
        gpu=1,
        mem_mb=8000,
        runtime=120,
    params:
        run=lambda w: run_of(w).to_json(),
    message:
        "train {wildcards.run_id} (ranks: {resources.gpu}, nodes: {resources.nodes})"
    shell:
        "python -m tokenscale launch --run {params.run:q} --nodes {resources.nodes} --output {output:q}"
        " --corpus {input.corpus:q} --tokenizer {input.tokenizer:q} --store {input.store:q}"
        " --validation-store {input.validation_store:q} > {log:q} 2>&1"


# The SLURM plugin must not see the resource `mpi` for one task, and needs it for several: hence two rules, one body.
use rule train_one as train_many with:
    wildcard_constraints:
        run_id=RUN_ON_MANY,
    resources:
        machine=1,
        mpi="srun",
        nodes=lambda w: nodes_of(w).nodes,
        tasks_per_node=lambda w: nodes_of(w).ranks_per_node,
        gpu=world_size,
        mem_mb=16000,
        runtime=120,
