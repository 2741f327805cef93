#!/usr/bin/env bash
# Slurm epilog (Epilog= in slurm.conf, runs as root on each node after a job's last task): what the
# job's processes still hold goes back.
#
# zeusd puts a process's settings back by itself when the process ends. This is for what outlives its
# job: a process that is stuck in the kernel, or that escaped the job's end. It takes well under a
# second, exits 0 when there is nothing to release, and never drains the node.
set -u
export PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin

[ -n "${SLURM_JOB_ID:-}" ] || exit 0
# Control groups, and so leases, name a job by its id; from Slurm 26.05 on by its SLUID.
for job in "$SLURM_JOB_ID" ${SLURM_JOB_SLUID:+"$SLURM_JOB_SLUID"}; do
    timeout 10 zeusctl release --job "$job" >/dev/null ||
        echo "zeusd epilog: leases of job $job could not be released (zeusctl: $?)" >&2
done
exit 0
