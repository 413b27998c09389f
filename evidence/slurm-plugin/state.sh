#!/usr/bin/env bash
# A job whose end `sacct` prints as "CANCELLED by 1000", or as PREEMPTED where no job may be requeued: Snakemake waits for ever.
# state.sh ["CANCELLED by 1000"|PREEMPTED|CANCELLED]   no SLURM is needed; exit code 137: still waiting after 40 s
set -u
cd "$(mktemp -d)"
mkdir bin
for name in squeue scancel scontrol sinfo sacctmgr sshare; do
  printf '#!/bin/sh\nexit 0\n' > bin/$name
done
printf '#!/bin/sh\necho submitted >> calls\necho 7\n' > bin/sbatch
printf '#!/bin/sh\necho "7|%s"\n' "${1:-CANCELLED by 1000}" > bin/sacct
chmod +x bin/*
export PATH="$PWD/bin:$PATH"
printf 'rule one:\n    output: "one"\n    resources: mem_mb=100, runtime=10\n    shell: "touch one"\n' > Snakefile
timeout -s KILL 40 snakemake --executor slurm --jobs 1 --retries 1 --slurm-no-requeue --slurm-status-command sacct \
  --slurm-init-seconds-before-status-checks 1 --default-resources slurm_account=a slurm_partition=p > log 2>&1
code=$?
echo "exit code $code, submitted $(wc -l < calls) times"
exit $code
