"""Why a GPU's clocks were limited, and who set the power limit that bound them."""

from __future__ import annotations

REASONS = ("power", "heat", "board", "sync", "reliability")
"""Why a GPU runs below the clocks that it could have: its power limit, its temperature, the board's
own limit or power brake, other GPUs of its sync boost group, the limit of its voltage."""

BMC, BY_LEASE, SITE = "BMC", "lease", "site"
"""Authors of a power limit that are no ceiling."""

RECENT_S = 10
"""The time of `GpuState.limited_ms`."""

_AUTHORS = {BMC: "at a limit of the BMC", SITE: "at the site limit", BY_LEASE: "at a lease's limit"}


def cause(reason: str, set_by: str | None) -> str:
    """Returns a reason with the author of the power limit: `power:rack1`."""
    return f"{reason}:{set_by}" if reason == "power" and set_by else reason


def cause_text(name: str) -> str:
    """Returns a cause in words: `at the ceiling rack1`."""
    reason, _, set_by = name.partition(":")
    if reason != "power":
        return f"limited by {reason}"
    if not set_by:
        return "at the power limit"
    return _AUTHORS.get(set_by, f"at the ceiling {set_by}")
