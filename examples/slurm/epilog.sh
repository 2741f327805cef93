#!/usr/bin/env bash
# Slurm epilog (Epilog= in slurm.conf, runs as root on each node after a job's last task): it restores
# what the job's processes still hold and what the job requested with --gpu-power, --gpu-clocks
# or --gpu-freq, and writes the energy of its GPUs to the journal.
#
# zeusd itself restores a process's settings when the process ends. The epilog is for processes that
# outlive their job, because they are stuck in the kernel or escaped the job's end. It takes well under a
# second, exits 0 if there is nothing to release, and never drains the node. Its messages are in the
# journal (journalctl -t zeusd-epilog), because slurmd 22.05 drops the output of epilogs.
set -u
export PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin

[ -n "${SLURM_JOB_ID:-}" ] || exit 0
gpus=${SLURM_JOB_GPUS:-${GPU_DEVICE_ORDINAL:-}}
declare -A failed=() # what failed, by its reason: one line of the log for each reason
fails() {
    local why=${2##*zeusctl: }
    why=${why:-zeusctl did not answer in time}
    failed[$why]+="${failed[$why]:+, }$1"
}
# One line: job 1234: 71.3 MJ in 8.00 GPU-hours, 4 % while idle; 2 GPUs released.
if [ -n "$gpus" ]; then
    said=$(timeout 10 zeusctl deallocate --slurm 2>&1)
    status=$?
    case $status in
    0)
        echo "$said"
        logger -t zeusd-epilog -- "$said" 2>/dev/null || true
        ;;
    9) ;; # this zeusd keeps no energy ledger
    *) fails "still charged to it ($status)" "$said" ;;
    esac
fi
[ -z "$gpus" ] || systemctl stop "zeusd-job-$SLURM_JOB_ID.service" 2>/dev/null || true # it holds clocks
# Control groups, and so leases, name a job by its id; from Slurm 26.05 on by its SLUID.
for job in "$SLURM_JOB_ID" ${SLURM_JOB_SLUID:+"$SLURM_JOB_SLUID"}; do
    said=$(timeout 10 zeusctl release --job "$job" 2>&1) || fails "leases of $job are not released ($?)" "$said"
done
rm -f "/run/zeusd-slurm/$SLURM_JOB_ID"
for why in "${!failed[@]}"; do
    line="job $SLURM_JOB_ID${gpus:+, GPUs $gpus}: ${failed[$why]}: $why"
    echo "zeusd epilog: $line" >&2
    logger -t zeusd-epilog -- "$line" 2>/dev/null || true
done
exit 0
