"""The doctor's checks for conditions that keep energy from being charged."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeusctl.machine_checks import accounting_checks, other_agents_check

PROC = "proc /proc proc rw,nosuid{} 0 0\n"


@pytest.mark.parametrize(
    ("conf", "options", "named"),
    [
        (None, "", []),
        ("PrologFlags=Alloc,Contain,X11\n", "", []),
        ("prologflags = contain # as it should be\n", ",hidepid=0", []),
        ("PrologFlags=Alloc\nPrologFlags=RunInJob\n", "", []),
        ("ClusterName=test\n", "", ["slurm"]),
        ("PrologFlags=Alloc # M\xfcller: Contain\n", ",hidepid=2", ["slurm", "processes"]),
        (None, ",hidepid=invisible", ["processes"]),
        ("PrologFlags=Contain\nGpuFreqDef=medium,memory=high\n", "", ["slurm"]),
    ],
)
@pytest.mark.parametrize("place", ["etc/slurm", "run/slurm/conf", "elsewhere"])
def test_each_problem_is_named(
    tmp_path: Path, place: str, conf: str | None, options: str, named: list[str]
) -> None:
    """Wherever slurmd has its configuration: configless, or named by $SLURM_CONF."""
    slurm, mounts = tmp_path / place / "slurm.conf", tmp_path / "mounts"
    slurm.parent.mkdir(parents=True)
    if conf is not None:
        slurm.write_bytes(conf.encode("latin-1"))
    mounts.write_text(PROC.format(options))
    environment = {"SLURM_CONF": str(slurm)} if place == "elsewhere" else {}
    found = [*accounting_checks(environment, str(tmp_path), mounts)]
    assert [one.name for one in found] == named
    assert all(one.remedy for one in found)
    said = "sets GpuFreqDef=medium,memory=high: " if conf and "GpuFreqDef" in conf else "lacks "
    assert "slurm" not in named or found[0].found.startswith(f"{slurm} {said}")


def test_flags_are_read_where_slurm_includes_them_and_a_conf_that_cannot_be_read_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "mounts").write_text(PROC.format(""))
    (tmp_path / "slurm.conf").write_text("Include more.conf\n")
    (tmp_path / "more.conf").write_text("PrologFlags=Contain\n")
    environment = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    assert not [*accounting_checks(environment, str(tmp_path), tmp_path / "mounts")]
    (tmp_path / "more.conf").unlink()
    (tmp_path / "more.conf").mkdir()
    (found,) = accounting_checks(environment, str(tmp_path), tmp_path / "mounts")
    assert "more.conf cannot be read (Is a directory)" in found.found


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("/usr/bin/python3.12|-u|/app/power_agent.py|--node|a|", True),
        ("python|power_agent.py|", True),
        ("vim|power_agent.py|", False),
        ("python|my_power_agent.py|", False),
        ("", False),  # a thread of the kernel
    ],
)
def test_dynamos_agent_is_named_by_its_process(tmp_path: Path, command: str, named: bool) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77/cmdline").write_bytes(command.replace("|", "\0").encode())
    (tmp_path / "78").mkdir()
    (tmp_path / "78/cmdline").symlink_to("gone")
    found = [*other_agents_check(tmp_path)]
    assert [one.state for one in found] == ["note"] * named
    assert all("Dynamo's Power Agent (process 77)" in one.found for one in found)
