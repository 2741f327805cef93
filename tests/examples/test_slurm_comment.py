"""The energy of jobs is written to Slurm's accounting, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support import zeusctl_line
from zeus_common import tables
from zeusctl.day_files import Row

SCRIPT = Path(__file__).parents[2] / "examples/slurm/energy/comment.sh"
BEGIN_S = 1_790_000_100


def row(
    node: str, kind: str, name: str, uj: int, lower: int, methods: str, run: str = "0", day: int = 0
) -> Row:
    begin_s = BEGIN_S + 86_400 * day
    return Row(node, begin_s, kind, name, run, 1000, uj, 0, lower, uj, 10**9, methods)


def test_a_jobs_nodes_and_runs_are_one_comment_and_others_words_stay(tmp_path: Path) -> None:
    files, programs = tmp_path / "files", tmp_path / "bin"
    files.mkdir()
    programs.mkdir()
    for node in ("n1", "n2"):
        rows = [
            row(node, "job", "7", 50_000_000, 50_000_000, "allocated"),
            row(node, "job", "8", 30_000_000, 10_000_000, "weights", run=node),
            row(node, "meters", "", 80_000_000, 80_000_000, ""),
        ]
        tables.write(files / f"energy-{node}-2026-09-21.csv", tables.kinds(Row), rows)
        rows = [
            row(node, "job", "6", 10_000_000, 10_000_000, "allocated", day=-5),  # has ended
            row(node, "job", "7", 70_000_000, 70_000_000, "allocated", day=-5),
            row(node, "meters", "", 80_000_000, 80_000_000, "", day=-5),
        ]
        tables.write(files / f"energy-{node}-2026-09-16.csv", tables.kinds(Row), rows)
    written = tmp_path / "written"
    for name, text in (
        ("zeusctl", zeusctl_line()),
        ("sacct", 'case "$*" in *"-j 7 "*) echo gpu_power_w=200,zeusd=1,j=5,b=exact,m=x ;; esac'),
        ("sacctmgr", f'echo "$*" >>{written}'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    for tres in ("", "1"):
        subprocess.run(
            ["bash", str(SCRIPT), str(files), "2026-09-20"],
            env={**os.environ, "PATH": path, "TRES": tres},
            check=True,
        )
    assert written.read_text().splitlines() == [
        "-i modify job where jobid=7 set "
        "AdminComment=gpu_power_w=200,zeusd=1,j=240,lo=240,up=240,b=exact,m=allocated",
        "-i modify job where jobid=8 set "
        "AdminComment=zeusd=1,j=60,lo=20,up=60,b=presence,m=weights",
        "-i modify job where jobid=7 set TRES=energy=240",
        "-i modify job where jobid=8 set TRES=energy=60",
    ]
