"""What a test needs besides Python packages: `@pytest.mark.needs("zsh")`, or `require("zsh")`.

A test whose needs are not met is not run, and the last lines of the run say so (tests/conftest.py).
With `CI=true`, or with `scripts/test --all`, it fails instead.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS_COMMAND = "sudo scripts/test --tools"
ROOT_COMMAND = "sudo scripts/test"
PYTHON_COMMAND = "PYTHON=/usr/bin/python3 scripts/test"
TITLE = "not run"
"""Of the last lines."""
NOBODY = 65534
CAP_SYS_ADMIN = 21


@dataclass(frozen=True)
class Tool:
    """A line of scripts/lib/tools.txt: programs, files or modules, all of which must be there."""

    name: str
    shown_by: tuple[str, ...]

    def path(self) -> str | None:
        """Path of the first program or file, None if anything is missing."""
        found = [_find(one) for one in self.shown_by]
        return found[0] if all(found) else None


def _find(alternatives: str) -> str | None:
    for one in alternatives.split("|"):
        if one.startswith("/"):
            found = max(glob.glob(one), default=None)
        elif one.startswith("python3:"):
            found = "/usr/bin/python3" if _system_python_has(one.partition(":")[2]) else None
        else:
            found = shutil.which(one)
        if found is not None:
            return found
    return None


def _system_python_has(module: str) -> bool:
    try:
        command = ["/usr/bin/python3", "-c", f"import {module}"]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def _tools() -> dict[str, Tool]:
    tools = {}
    for line in (ROOT / "scripts/lib/tools.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, *shown_by = line.partition(" : ")[0].split()
            tools[name] = Tool(name, tuple(shown_by))
    return tools


TOOLS = _tools()


def others_may_run_this_python() -> bool:
    """Whether an ordinary user may execute this interpreter and read its packages."""
    command = [sys.executable, "-c", "import zeus_ipc"]
    try:
        ran = subprocess.run(
            command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", stderr=subprocess.DEVNULL
        )
    except PermissionError:
        return False
    return ran.returncode == 0


def _has_cap_sys_admin() -> bool:
    effective = next(
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff:")
    )
    return os.geteuid() == 0 and bool(int(effective, 16) >> CAP_SYS_ADMIN & 1)


def _may(command: list[str], **who: Any) -> bool:
    try:
        return subprocess.run(command, stderr=subprocess.DEVNULL, **who).returncode == 0
    except OSError:
        return False


def _may_make_user_namespaces() -> bool:
    who: dict[str, Any] = {} if os.geteuid() else {"user": NOBODY, "group": NOBODY}
    return _may(["unshare", "--user", "--map-root-user", "true"], **who)


def control_groups() -> Path:
    """Where groups are made: the hierarchy that slurmd uses, in version 1 the freezer."""
    base = Path("/sys/fs/cgroup")
    return base / "freezer" if (base / "freezer").is_dir() else base


def _may_make_control_groups() -> bool:
    folder = control_groups() / f"zeusd-needs-{os.getpid()}"
    try:
        folder.mkdir()
        folder.rmdir()
    except OSError:
        return False
    return True


RIGHTS: dict[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() == 0,
    "two users": lambda: os.geteuid() == 0 and others_may_run_this_python(),
    "CAP_SYS_ADMIN": _has_cap_sys_admin,
    "user namespaces": _may_make_user_namespaces,
    "control groups": _may_make_control_groups,
    "time namespaces": lambda: _may(["unshare", "--time", "--fork", "--monotonic", "1", "true"]),
}
"""What a user, a container or a kernel must allow; `two users` is root beside an ordinary user."""

_NAMESPACES = ("CAP_SYS_ADMIN", "util-linux")
_SYSTEMD = (*_NAMESPACES, "systemd-nspawn", "systemd-python", "procps", "gcc")
GROUPS = {
    "namespaces": _NAMESPACES,
    "systemd": _SYSTEMD,
    "debian package": (*_SYSTEMD, "debhelper", "lintian"),
}
"""Several needs by one name: to mount and to make namespaces, to boot a systemd, and to build a
Debian package and install it there."""


NAMES = frozenset({*TOOLS, *RIGHTS, *GROUPS})


@cache
def _is_met(need: str) -> bool:
    return TOOLS[need].path() is not None if need in TOOLS else RIGHTS[need]()


def unmet(*needs: str) -> list[str]:
    """Those of these needs that are not met here.

    Args:
        needs: Names in scripts/lib/tools.txt, `RIGHTS` or `GROUPS`.

    Raises:
        KeyError: There is no such name.
    """
    each = [part for need in needs for part in GROUPS.get(need, (need,))]
    return [need for need in dict.fromkeys(each) if not _is_met(need)]


def require(*needs: str) -> None:
    """Ends the test here if a need is not met: not run, or failed where everything must run."""
    if missing := unmet(*needs):
        not_run("needs " + ", ".join(missing))


def tool(name: str) -> str:
    """Path of a tool's program; ends the test if it is missing."""
    require(name)
    path = TOOLS[name].path()
    assert path is not None
    return path


def module(name: str) -> Any:
    """A Python module of an optional dependency; the tests of the module that asks need it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        not_run(f"needs the Python module {name}")


def package(name: str) -> None:
    """Like `module`, for modules that programs or later tests import: imports nothing here."""
    if importlib.util.find_spec(name) is None:
        not_run(f"needs the Python module {name}")


def not_run(reason: str) -> NoReturn:
    """Ends the test here: not run, or failed where everything must run."""
    if must_run_all():
        pytest.fail(". ".join([reason, *_remedies([reason])]), pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def not_on_this_kernel(reason: str) -> NoReturn:
    """Ends the test here: not run, also where everything must run, as nothing can be installed."""
    pytest.skip(f"this kernel: {reason}")


def must_run_all() -> bool:
    """Whether a test fails that cannot run here."""
    return bool(os.environ.get("ZEUSD_TEST_ALL")) or os.environ.get("CI") == "true"


def ignored() -> dict[str, str]:
    """The environment of a pytest in which what cannot run does not fail."""
    return {key: text for key, text in os.environ.items() if key not in ("CI", "ZEUSD_TEST_ALL")}


def summary(reasons: list[str]) -> list[str]:
    """The last lines of a run.

    Args:
        reasons: Why a test was not run, one for each test.
    """
    if not reasons:
        return []
    count = {reason: reasons.count(reason) for reason in reasons}
    lines = [f"{len(reasons)} {'tests were' if len(reasons) > 1 else 'test was'} not run:"]
    lines += [f"{number:5d}  {reason}" for reason, number in sorted(count.items())]
    return lines + _remedies(reasons)


def _remedies(reasons: list[str]) -> list[str]:
    missing = {
        name
        for reason in reasons
        if reason.startswith("needs ")
        for name in reason.removeprefix("needs ").split(", ")
    }
    lines = []
    if tools := sorted(missing & TOOLS.keys()):
        lines.append(f"Install {', '.join(tools)}: {TOOLS_COMMAND}")
    if "two users" in missing and os.geteuid() == 0:
        lines.append(
            f"Other users may not run {sys.executable}; make the environment with a Python that "
            f"they may run: {PYTHON_COMMAND}"
        )
    elif missing & {"root", "two users", "CAP_SYS_ADMIN"}:
        lines.append(f"Run as root what needs root, two users or CAP_SYS_ADMIN: {ROOT_COMMAND}")
    return lines
