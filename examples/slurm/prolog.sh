#!/usr/bin/env bash
# Slurm prolog (Prolog= in slurm.conf, runs as root on each node before a job's first task): it sets the
# job's GPUs to the site limit, even if someone set them outside zeusd; charges their energy to the job
# from now on; and sets what the job requested with --gpu-power and --gpu-clocks (spank/), or with Slurm's
# own --gpu-freq. On a GPU that jobs share (shards, MPS, MIG), it leaves alone what other jobs hold. If it
# cannot be known which GPUs the job has, it does nothing and says why.
#
# A prolog that fails drains the node. A power limit is no reason for that, so this one never fails.
# Errors are in the journal (journalctl -t zeusd-prolog), because slurmd 22.05 drops the output of
# prologs. A refusal by zeusd is in /run/zeusd-slurm/JOBID, where the plugin finds it.
set -u
export PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin

gpus=${SLURM_JOB_GPUS:-${GPU_DEVICE_ORDINAL:-}} job=${SLURM_JOB_ID:-}
[ -n "$gpus" ] || exit 0
declare -A failed=() # what failed, by its reason: one line of the log for each reason
fails() {
    local why=${2##*zeusctl: }
    why=${why:-zeusctl did not answer in time}
    failed[$why]+="${failed[$why]:+, }$1"
}
# A GPU that does not answer must not delay the job, nor hide its reason.
export ZEUSCTL_TIMEOUT=4
said=$(timeout 10 zeusctl allocate --slurm 2>&1)
status=$?
case $status in
0 | 9) ;; # 9: this zeusd keeps no energy ledger
*) fails "energy is not charged ($status)" "$said" ;;
esac
# "slurm": the job's GPUs. SLURM_JOB_GPUS has positions in gres.conf, not indices.
said=$(timeout 10 zeusctl reset slurm 2>&1) || fails "not reset ($?)" "$said"

refused() {
    fails "$1" "$2"
    local why=${2##*zeusctl: } # one line, as the plugin reads them
    mkdir -p -m 0755 /run/zeusd-slurm && printf '%s: %s\n' "$1" "${why//$'\n'/ }" >>"/run/zeusd-slurm/$job"
}
rm -f "/run/zeusd-slurm/$job"
# It comes from the user's own sbatch, so it is not trusted.
watts=${SPANK_GPU_POWER:-} clocks=${SPANK_GPU_CLOCKS:-} applied= option= held=()
if [ -n "$watts" ] && [ -n "$job" ]; then
    if ! [[ $watts =~ ^[0-9]{1,4}$ ]]; then
        refused --gpu-power "not a number of watts"
    # A bound for the job, not a lease: its own programs may still go lower.
    elif said=$(timeout 10 zeusctl set slurm -p "$watts" --ceiling "job:$job" 2>&1); then
        applied="gpu_power_w=$watts"
    else
        refused "--gpu-power=$watts" "$said"
    fi
fi
if [ -n "$clocks" ]; then
    if [[ $clocks =~ ^[0-9]{1,5},[0-9]{1,5}$ ]]; then
        option=--gpu-clocks=$clocks held=(-g "$clocks") value=gpu_clocks_mhz=${clocks/,/-}
    else
        refused --gpu-clocks "not a range of MHz"
    fi
# Slurm gives a prolog everything but this, so the controller is asked: gpu:900, gpu:medium,memory=high. Of
# an array it lists all tasks.
elif [ -n "$job" ] && command -v squeue >/dev/null; then
    said=$(timeout 5 squeue -h -j "$job" -O jobid:20,tres-freq:64 2>&1) || fails "--gpu-freq is not known ($?)" "$said"
    while read -r id freq; do
        [[ $id == "$job" && $freq =~ ^gpu:([a-z0-9=,]+)$ && $freq != gpu:verbose ]] || continue
        freq=${BASH_REMATCH[1]}
        option=--gpu-freq=$freq held=(--gpu-freq "$freq") value=gpu_freq=${freq//,/+}
    done <<<"$said"
fi
if [ -n "$option" ] && [ -n "$job" ]; then
    # Clocks have no ceilings, so a separate process holds the lease until the epilog ends it. It notifies
    # systemd when it has the lease.
    if timeout 10 systemd-run --quiet --collect --unit "zeusd-job-$job" --service-type notify \
        --setenv "ZEUSD_SOCK_PATH=${ZEUSD_SOCK_PATH:-}" --setenv "SLURM_JOB_GPUS=$gpus" \
        --setenv "CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-}" --setenv "SLURM_CONF=${SLURM_CONF:-}" \
        --setenv "SLURMD_NODENAME=${SLURMD_NODENAME:-}" \
        "$(command -v zeusctl)" set slurm "${held[@]}" 2>/dev/null; then
        applied="${applied:+$applied,}$value"
    else
        said=$(journalctl --sync && journalctl -q -n 1 -o cat "_SYSTEMD_UNIT=zeusd-job-$job.service")
        refused "$option" "$said"
    fi
fi
# Shown by sacct and scontrol.
[ -z "$applied" ] || said=$(timeout 5 scontrol update "JobId=$job" "AdminComment=$applied" 2>&1) ||
    fails "AdminComment is not set" "$said"
for why in "${!failed[@]}"; do
    line="job ${job:-?}, GPUs $gpus: ${failed[$why]}: $why"
    echo "zeusd prolog: $line" >&2
    logger -t zeusd-prolog -- "$line" 2>/dev/null || true
done
exit 0
