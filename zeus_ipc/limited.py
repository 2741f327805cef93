"""Why a GPU's clocks were limited, and who set the power limit that bound them."""

from __future__ import annotations

from collections.abc import Mapping

REASONS = ("power", "heat", "board", "sync", "reliability")
"""Why a GPU runs below the clocks that it could have: its power limit, its temperature, the board's
own limit or power brake, other GPUs of its sync boost group, the limit of its voltage."""

BMC, BY_LEASE, SITE = "BMC", "lease", "site"
"""Authors of a power limit that are no ceiling."""

RECENT_S = 10
"""The time of `GpuState.limited_ms`."""

SAME_MW = 1000
"""Drivers round limits to whole watts: closer ones are the same."""


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


def author(
    limit_mw: int | None,
    enforced_mw: int | None,
    leased_mw: int | None = None,
    site_mw: int | None = None,
    ceilings: Mapping[str, int] | None = None,
) -> str | None:
    """Returns who set the power limit in force: `BMC`, a ceiling's name, `site` or `lease`; None:
    nobody is known.

    Args:
        limit_mw: The limit that software requested.
        enforced_mw: The limit in force.
        leased_mw: The limit that the holder of a lease has set; None: there is none.
        site_mw: The site limit; None: there is none below the GPU's own.
        ceilings: The ceilings by name.
    """
    if limit_mw is None:
        return None
    # Only what is outside the driver lowers a limit below the one that was requested.
    if enforced_mw is not None and enforced_mw <= limit_mw - SAME_MW:
        return BMC
    bounds = {**({} if site_mw is None else {SITE: site_mw}), **(ceilings or {})}
    lowest = min(bounds, key=lambda name: bounds[name], default=None)
    # A lower limit is a holder's choice, a higher one someone else's.
    if lowest is not None and abs(limit_mw - bounds[lowest]) < SAME_MW:
        return lowest
    if leased_mw is not None and abs(limit_mw - leased_mw) < SAME_MW:
        return BY_LEASE
    return None
