"""Small jobs that a test lets end: each starts, waits for its file `NAME.go`, and writes its output."""

from tokenscale.cli.snakemake import internals
from tokenscale.cli.snakemake.executor import install_executor

internals.check_release(workflow)
internals.check_executor_plugin()
install_executor()

# a line for each start
START = 'echo "${{SLURM_JOB_ID:-}}" >> small/{wildcards.name}.started; '
END = "until [ -e small/{wildcards.name}.go ]; do sleep 0.2; done; echo {wildcards.name} > {output}"


localrules:
    all,
    here,


rule all:
    input:
        expand("small/{name}.txt", name=config["names"].split(",")),


rule small:
    output:
        "small/{name}.txt",
    resources:
        mem_mb=600,
    shell:
        START + END


rule alone:
    """Has its node to itself."""
    output:
        "small/{name,broken|preempted}.txt",
    resources:
        mem_mb=600,
        slurm_extra="--exclusive",
        slurm_partition=lambda w, attempt: (
            "low" if w.name == "preempted" and attempt == 1 else "normal"
        ),
    shell:
        START + END


rule here:
    """Runs beside Snakemake."""
    output:
        "small/{name,here}.txt",
    shell:
        START + END


rule after:
    """Is ready when that has ended."""
    input:
        "small/here.txt",
    output:
        "small/{name,after}.txt",
    resources:
        mem_mb=600,
    shell:
        START + END


ruleorder: after > here > alone > small
