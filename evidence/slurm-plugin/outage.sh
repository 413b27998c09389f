#!/usr/bin/env bash
# `sbatch` times out for 20 s: all attempts of all jobs are used up in that time, and nothing is run.
# outage.sh   no SLURM is needed; prints how many of 12 outputs are there
set -u
cd "$(mktemp -d)"
mkdir bin
for name in squeue scancel scontrol sinfo sacctmgr sshare; do
  printf '#!/bin/sh\nexit 0\n' > bin/$name
done
cat > bin/sbatch <<END
#!/bin/sh
echo called >> calls
[ \$(date +%s) -gt $(($(date +%s) + 20)) ] || { echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1; }
touch "\$(echo "\$*" | sed 's/.*wildcards_\([0-9]*\).*/\1/')"
echo 7
END
printf '#!/bin/sh\necho "7|COMPLETED"\n' > bin/sacct
chmod +x bin/*
export PATH="$PWD/bin:$PATH"
printf 'rule all:\n    input: expand("{n}", n=range(12))\nrule one:\n    output: "{n}"\n    shell: "touch {output}"\n' > Snakefile
timeout -s KILL 90 snakemake --executor slurm --jobs 20 --retries 3 --keep-going --slurm-status-command sacct \
  --slurm-init-seconds-before-status-checks 1 --default-resources slurm_account=a slurm_partition=p runtime=10 > log 2>&1
echo "exit code $?, sbatch called $(wc -l < calls) times, outputs: $(ls | grep -c '^[0-9]')"
