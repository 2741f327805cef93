#!/usr/bin/env bash
# Slurm epilog (Epilog= in slurm.conf, runs as root on each node after a job's last task): what the
# job's processes still hold, and what the job asked for with --gpu-power, is restored, and what its GPUs
# drew is written to the journal.
#
# zeusd restores a process's settings by itself when the process ends. This is for what outlives its
# job: a process that is stuck in the kernel, or that escaped the job's end. It takes well under a
# second, exits 0 when there is nothing to release, and never drains the node. What it has to say is in
# the journal (journalctl -t zeusd-epilog): slurmd 22.05 drops what epilogs print.
set -u
export PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin

say() {
    echo "zeusd epilog: $1" >&2
    logger -t zeusd-epilog -- "$1" 2>/dev/null || true
}
[ -n "${SLURM_JOB_ID:-}" ] || exit 0
# One line: job 1234: 71.3 MJ in 8.00 GPU-hours, 4 % of it idle; 2 GPUs released.
if [ -n "${SLURM_JOB_GPUS:-${GPU_DEVICE_ORDINAL:-}}" ]; then
    said=$(timeout 10 zeusctl deallocate --slurm 2>&1)
    status=$?
    case $status in
    0)
        echo "$said"
        logger -t zeusd-epilog -- "$said" 2>/dev/null || true
        ;;
    9) ;; # this zeusd keeps no energy ledger
    *) say "GPUs of job $SLURM_JOB_ID are still charged to it ($status): $said" ;;
    esac
fi
[ -z "${SPANK_GPU_CLOCKS:-}" ] || systemctl stop "zeusd-job-$SLURM_JOB_ID.service" 2>/dev/null || true
# Control groups, and so leases, name a job by its id; from Slurm 26.05 on by its SLUID.
for job in "$SLURM_JOB_ID" ${SLURM_JOB_SLUID:+"$SLURM_JOB_SLUID"}; do
    timeout 10 zeusctl release --job "$job" >/dev/null ||
        say "leases of job $job could not be released (zeusctl: $?)"
done
rm -f "/run/zeusd-slurm/$SLURM_JOB_ID"
exit 0
