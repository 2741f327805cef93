"""The capabilities of this process."""

from __future__ import annotations

from pathlib import Path

STATUS = "/proc/self/status"

_SYS_ADMIN = 21
"""CAP_SYS_ADMIN, capabilities(7)."""


def has_sys_admin() -> bool:
    """Whether this process has CAP_SYS_ADMIN, which a driver requires to set limits.

    With zeusd no process needs it.

    Raises:
        OSError: /proc is not mounted, or is another system's.
    """
    for line in Path(STATUS).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _SYS_ADMIN & 1)
    raise OSError(f"{STATUS} has no capabilities")
