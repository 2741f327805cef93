#!/usr/bin/env bash
# Slurm prolog (Prolog= in slurm.conf, runs as root on each node before a job's first task): the job's
# GPUs begin at the site's maximum, whatever somebody set on them past zeusd.
#
# A prolog that fails drains the node; a power limit is no reason for that, so this never fails. What
# went wrong is in slurmd's log, and `zeusctl doctor` says why.
set -u
export PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin

gpus=${SLURM_JOB_GPUS:-${GPU_DEVICE_ORDINAL:-}}
[ -n "$gpus" ] || exit 0
timeout 10 zeusctl reset "$gpus" >/dev/null ||
    echo "zeusd prolog: GPUs $gpus of job ${SLURM_JOB_ID:-?} could not be reset (zeusctl: $?)" >&2
exit 0
