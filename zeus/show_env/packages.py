"""The sections of `zeus.show_env` on packages, the system, and this process's rights."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from zeus_common.installed import overlap
from zeus_common.processes import has_sys_admin
from zeus_common.text import group_name, user_name
from zeus_ipc._version import __version__

REINSTALL = "install zeusd again: pip install --force-reinstall zeusd"

Row = tuple[str, str]
"""A line of a section: a name, and its text."""

PACKAGES = {
    "zeusd": f"not installed as a package; running {__version__} from a checkout",
    "pyzmq": f"missing; {REINSTALL}",
    "msgpack": f"missing; {REINSTALL}",
    "pydantic": f"missing; {REINSTALL}",
    "nvidia-ml-py": f"missing; {REINSTALL}",
    "torch": "not installed; nothing here needs it",
    "prometheus-client": 'not installed; only zeus.metric needs it: pip install "zeusd[metrics]"',
}
"""The text for each missing package."""


def packages() -> list[Row]:
    """Versions, and missing packages."""
    rows = [(name, _version(name) or missing) for name, missing in PACKAGES.items()]
    other = _version("pynvml")
    if other is not None and other.split(".")[0].isdecimal() and int(other.split(".")[0]) < 12:
        rows.append(
            (
                "pynvml",
                f"{other}, which replaces nvidia-ml-py; remove it: pip uninstall pynvml "
                "&& pip install --force-reinstall nvidia-ml-py",
            )
        )
    mixed = overlap(str(Path(__file__).parent.parent))
    return rows if mixed is None else [*rows, ("zeus", mixed)]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def system() -> list[Row]:
    """Python and the operating system."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return [
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("OS", f"{name}, {platform.system()} {platform.release()} {platform.machine()}"),
    ]


def rights(zeusd: bool) -> list[Row]:
    """The user, and whether the driver lets this process change settings."""
    groups = [f"{group_name(gid)} ({gid})" for gid in sorted({os.getegid(), *os.getgroups()})]
    hint = "zeusd does it for you" if zeusd else "run zeusd to do it for you"
    try:
        capable = has_sys_admin()
    except OSError:
        answer = "not known: /proc is not mounted here"
    else:
        answer = "effective: the driver lets this process set limits and clocks"
        if not capable:
            answer = f"not effective: the driver refuses to set limits and clocks; {hint}"
    return [
        ("user", f"{user_name(os.geteuid())} (uid {os.geteuid()})"),
        ("groups", ", ".join(groups)),
        ("CAP_SYS_ADMIN", answer),
    ]


def unexpected(error: Exception) -> str:
    """The text for an unexpected error."""
    if isinstance(error, ImportError):
        return f"{error}; {REINSTALL}"
    return f"{type(error).__name__}: {error}; please report it with all of this output"
