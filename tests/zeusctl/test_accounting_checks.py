"""The doctor's checks for conditions that keep energy from being charged."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeusctl.machine_checks import accounting_checks

PROC = "proc /proc proc rw,nosuid{} 0 0\n"


@pytest.mark.parametrize(
    ("conf", "options", "named"),
    [
        (None, "", []),
        ("PrologFlags=Alloc,Contain,X11\n", "", []),
        ("prologflags = contain # as it should be\n", ",hidepid=0", []),
        ("ClusterName=test\n", "", ["slurm"]),
        ("PrologFlags=Alloc\n", ",hidepid=2", ["slurm", "processes"]),
        (None, ",hidepid=invisible", ["processes"]),
    ],
)
def test_each_problem_is_named(
    tmp_path: Path, conf: str | None, options: str, named: list[str]
) -> None:
    slurm, mounts = tmp_path / "slurm.conf", tmp_path / "mounts"
    if conf is not None:
        slurm.write_text(conf)
    mounts.write_text(PROC.format(options))
    found = [*accounting_checks(str(slurm), str(mounts))]
    assert [one.name for one in found] == named
    assert all(one.remedy for one in found)
