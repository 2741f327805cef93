"""What this process may do."""

from __future__ import annotations

from pathlib import Path

_SYS_ADMIN = 21
"""CAP_SYS_ADMIN, capabilities(7)."""


def has_sys_admin() -> bool:
    """Whether this process has CAP_SYS_ADMIN, which a driver wants of those who set limits.

    With zeusd no process needs it.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _SYS_ADMIN & 1)
    return False
