"""Checks of the doctor: settings of this machine that prevent correct energy accounting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zeusctl.reports import Check

SLURM_CONF = "/etc/slurm/slurm.conf"
MOUNTS = "/proc/self/mounts"


def checks(slurm_conf: str = SLURM_CONF, mounts: str = MOUNTS) -> Iterator[Check]:
    """Yields a check for each problem; nothing if all is well.

    Args:
        slurm_conf: Slurm's configuration; need not exist.
        mounts: The table of mounts.
    """
    flags = _setting(slurm_conf, "prologflags")
    if flags is not None and "contain" not in flags.lower().split(","):
        yield Check(
            name="slurm",
            state="note",
            found=f"{slurm_conf} lacks PrologFlags=Contain: a job's control group may vanish "
            "between its steps, and its GPUs are then charged to nobody",
            remedy="set PrologFlags=Contain",
        )
    hidden = [line for line in _lines(mounts) if " proc " in line and "hidepid=" in line]
    if hidden and "hidepid=0" not in hidden[0] and "hidepid=off" not in hidden[0]:
        yield Check(
            name="processes",
            state="note",
            found="/proc is mounted with hidepid: whose a process is may be hidden from zeusd",
            remedy="give zeusd's group access with the mount option gid=",
        )


def _setting(path: str, name: str) -> str | None:
    """Returns a setting of slurm.conf: empty if it is not set, None if there is no such file."""
    if not Path(path).is_file():
        return None
    found = ""
    for line in _lines(path):
        key, _, value = line.partition("#")[0].partition("=")
        if key.strip().lower() == name:
            found = value.strip()
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
