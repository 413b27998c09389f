#!/usr/bin/env bash
# `sacct` fails for ten calls, about eight seconds: all jobs are forgotten, and Snakemake waits for ever.
# silence.sh   no SLURM is needed; exit code 137: still waiting after 60 s, though the job ended well in the meantime
set -u
cd "$(mktemp -d)"
mkdir bin
for name in squeue scancel scontrol sinfo sacctmgr sshare; do
  printf '#!/bin/sh\nexit 0\n' > bin/$name
done
printf '#!/bin/sh\ntouch one\necho 7\n' > bin/sbatch
printf '#!/bin/sh\necho asked >> calls\n[ $(wc -l < calls) -gt 10 ] || exit 1\necho "7|COMPLETED"\n' > bin/sacct
chmod +x bin/*
export PATH="$PWD/bin:$PATH"
printf 'rule one:\n    output: "one"\n    resources: mem_mb=100, runtime=10\n    shell: "touch one"\n' > Snakefile
timeout -s KILL 60 snakemake --executor slurm --jobs 1 --slurm-status-command sacct --slurm-status-attempts 10 \
  --slurm-init-seconds-before-status-checks 1 --default-resources slurm_account=a slurm_partition=p > log 2>&1
code=$?
tail -2 log
echo "exit code $code, sacct called $(wc -l < calls) times, output there: $(ls one)"
exit $code
