#!/usr/bin/env bash
# Slurm prolog (Prolog= in slurm.conf, runs as root on each node before a job's first task): the job's
# GPUs begin at the site's maximum, whatever somebody set on them past zeusd, and what they draw from
# now on is charged to the job.
#
# A prolog that fails drains the node; a power limit is no reason for that, so this never fails. What
# went wrong is in slurmd's log, and `zeusctl doctor` says why.
set -u
export PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin

gpus=${SLURM_JOB_GPUS:-${GPU_DEVICE_ORDINAL:-}}
[ -n "$gpus" ] || exit 0
said=$(timeout 10 zeusctl allocate --slurm 2>&1)
status=$?
case $status in
0 | 9) ;; # 9: this zeusd keeps no energy ledger
*) echo "zeusd prolog: GPUs of job ${SLURM_JOB_ID:-?} are not charged to it ($status): $said" >&2 ;;
esac
timeout 10 zeusctl reset "$gpus" >/dev/null ||
    echo "zeusd prolog: GPUs $gpus of job ${SLURM_JOB_ID:-?} could not be reset (zeusctl: $?)" >&2
exit 0
