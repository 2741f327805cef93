#!/usr/bin/env bash
# Slurm epilog (Epilog= in slurm.conf, runs as root on each node after a job's last task): what the
# job's processes still hold goes back, and what its GPUs drew is written to slurmd's log.
#
# zeusd puts a process's settings back by itself when the process ends. This is for what outlives its
# job: a process that is stuck in the kernel, or that escaped the job's end. It takes well under a
# second, exits 0 when there is nothing to release, and never drains the node.
set -u
export PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin

[ -n "${SLURM_JOB_ID:-}" ] || exit 0
# One line: job 1234: 71.3 MJ in 8.00 GPU-hours, 4 % of it idle; 2 GPUs released.
if [ -n "${SLURM_JOB_GPUS:-${GPU_DEVICE_ORDINAL:-}}" ]; then
    said=$(timeout 10 zeusctl deallocate --slurm 2>&1)
    status=$?
    case $status in
    0) echo "$said" ;;
    9) ;; # this zeusd keeps no energy ledger
    *) echo "zeusd epilog: GPUs of job $SLURM_JOB_ID are still charged to it ($status): $said" >&2 ;;
    esac
fi
# Control groups, and so leases, name a job by its id; from Slurm 26.05 on by its SLUID.
for job in "$SLURM_JOB_ID" ${SLURM_JOB_SLUID:+"$SLURM_JOB_SLUID"}; do
    timeout 10 zeusctl release --job "$job" >/dev/null ||
        echo "zeusd epilog: leases of job $job could not be released (zeusctl: $?)" >&2
done
exit 0
