#!/usr/bin/env bash
# comment.sh FOLDER [SINCE]: writes what each job used, over all its nodes, to Slurm's accounting: of the
# jobs that held a GPU since SINCE, everything that the files have.
#
# Run it from a timer on one machine, as an operator of Slurm, after the nodes have written their files
# (`zeusctl energy --since 2d --export FOLDER`). Nodes that each write AdminComment overwrite each
# other. The form survives Slurm 22.05, which converts the text to lower case: zeusd=1,j=JOULES,
# lo=,up=,b=BOUNDS,m=BASIS. Other parts of the comment stay, such as gpu_power_w=200 of the prolog.
# From Slurm 25.11 on, TRES=1 sets the job's energy instead, which sacct shows as ConsumedEnergyRaw.
set -euo pipefail
folder=${1:?usage: comment.sh FOLDER [SINCE]} since=${2:-2d}

energy() {
    zeusctl energy --from "$folder" --by job --since "$1" --format csv
}
{
    energy "$since"
    energy 2000-01-01
} | awk -F, '
    $1 == "since" { files++; for (i = 1; i <= NF; i++) at[$i] = i; next }
    $at["kind"] == "job" && files == 1 { recent[$at["name"]] }
    $at["kind"] == "job" && files == 2 && $at["name"] in recent {
        job = $at["name"]
        j[job] += $at["energy_j"]; lo[job] += $at["lower_j"]; up[job] += $at["upper_j"]
        # A sum of several is as certain as the least certain of them.
        if ($at["bounds"] == "activity" || b[job] == "" || b[job] == "exact") b[job] = $at["bounds"]
        m[job] = m[job] == "" || m[job] == $at["basis"] ? $at["basis"] : "several"
    }
    END { for (job in j) printf "%s %.0f %.0f %.0f %s %s\n", job, j[job], lo[job], up[job], b[job], m[job] }
' | sort -n | while read -r job joules lower upper bounds basis; do
    if [ -n "${TRES:-}" ]; then
        sacctmgr -i modify job where "jobid=$job" set "TRES=energy=$joules" >/dev/null ||
            echo "comment.sh: job $job: its energy could not be set" >&2
        continue
    fi
    others=$(sacct -X -n -P -j "$job" -o AdminComment | head -n 1 | tr ',' '\n' |
        grep -vE '^(zeusd|j|lo|up|b|m)=' | paste -sd, -) || others=
    text="${others:+$others,}zeusd=1,j=$joules,lo=$lower,up=$upper,b=$bounds,m=${basis//+/.}"
    sacctmgr -i modify job where "jobid=$job" set "AdminComment=$text" >/dev/null ||
        echo "comment.sh: job $job: AdminComment could not be set" >&2
done
