#!/usr/bin/env bash
# Slurm epilog (Epilog= in slurm.conf, runs as root on each node after a job's last task): what the
# job's processes still hold, and what the job asked for with --gpu-power, is restored.
#
# zeusd restores a process's settings by itself when the process ends. This is for what outlives its
# job: a process that is stuck in the kernel, or that escaped the job's end. It takes well under a
# second, exits 0 when there is nothing to release, and never drains the node. What went wrong is in the
# journal (journalctl -t zeusd-epilog).
set -u
export PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin

say() {
    echo "zeusd epilog: $1" >&2
    logger -t zeusd-epilog -- "$1" 2>/dev/null || true
}
[ -n "${SLURM_JOB_ID:-}" ] || exit 0
[ -z "${SPANK_GPU_CLOCKS:-}" ] || systemctl stop "zeusd-job-$SLURM_JOB_ID.service" 2>/dev/null || true
# Control groups, and so leases, name a job by its id; from Slurm 26.05 on by its SLUID.
for job in "$SLURM_JOB_ID" ${SLURM_JOB_SLUID:+"$SLURM_JOB_SLUID"}; do
    timeout 10 zeusctl release --job "$job" >/dev/null ||
        say "leases of job $job could not be released (zeusctl: $?)"
done
rm -f "/run/zeusd-slurm/$SLURM_JOB_ID"
exit 0
