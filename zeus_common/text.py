"""Numbers with their units, names of users, groups and GPUs, and faults, as people read them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zeus_ipc.controls import SPECS, Control

if TYPE_CHECKING:
    from pydantic import ValidationError


def count(number: int, noun: str) -> str:
    """A number of things: `1 lease`, `2 leases`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def gpus_text(indices: Sequence[int | str]) -> str:
    """GPUs by their indices: `GPU 0`, `GPUs 0, 3`."""
    return f"GPU{'' if len(indices) == 1 else 's'} {', '.join(map(str, indices))}"


def value_text(control: str, value: Sequence[int] | None) -> str:
    """Formats a control's value in the journal's form."""
    return "not set" if value is None else SPECS[Control(control)].text(value)


def quantity_text(control: str, value: Any) -> str:
    """Formats a control's value in the form of reports: in its unit, or by its members' names."""
    spec = SPECS[Control(control)]
    if value is None:
        return "not set"
    parts = value if isinstance(value, (list, tuple)) else [value]
    if spec.shape == "set":
        return ", ".join(parts) or "none"
    return spec.text([round(part * spec.scale) for part in parts])


def number(value: float | None, unit: str = "", digits: int = 1) -> str:
    """Formats a number, to at most this many decimals, with its unit."""
    if value is None:
        return "-"
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}".rstrip()


def percent(share: float, spec: str = ".1") -> str:
    """Formats a share: `17.7 %`; with `+.0` as `spec`, `+18 %`."""
    return f"{share:{spec}%}".replace("%", " %")


def duration(seconds: float) -> str:
    """How long, in the two largest units: `3 d 4 h`."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(int(seconds), length)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def split(partitions: Sequence[int]) -> str:
    """Describes how a GPU is split: into partitions (AMD) or instances (NVIDIA)."""
    return count(len(partitions), "partition") if len(partitions) > 1 else "MIG is on"


def memory(mib: int | None) -> str:
    """Formats memory: MiB below 1 GiB, else GiB."""
    if mib is None:
        return "-"
    return f"{mib} MiB" if mib < 1024 else number(mib / 1024, "GiB")


def energy(joules: float) -> str:
    """Formats joules with a prefix that leaves at most four digits before the point."""
    for factor, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if abs(joules) >= 10 * factor:
            return f"{joules / factor:.1f} {unit}"
    return f"{joules:.1f} J"


def seconds_since(t_ns: int) -> float:
    """Seconds since an instant of CLOCK_MONOTONIC."""
    return max(0.0, (time.monotonic_ns() - t_ns) / 1e9)


def table(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, left: int, last_left: bool = False
) -> str:
    """Formats columns, the first `left` of them left-aligned, the others right-aligned."""
    cells = [tuple(head), *[tuple(map(str, row)) for row in rows]]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    lines = []
    for row in cells:
        line = []
        for n, cell in enumerate(row):
            to_left = n < left or (last_left and n == len(row) - 1)
            line.append(cell.ljust(widths[n]) if to_left else cell.rjust(widths[n]))
        lines.append("  ".join(line).rstrip())
    return "\n".join(lines)


def known_user(uid: int) -> str | None:
    """Returns a user's name; None if there is none, or it cannot be looked up."""
    import pwd  # Unix only, but reports are printed elsewhere, too

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return None


@lru_cache(maxsize=1024)
def user_name(uid: int) -> str:
    """Returns a user's name, or the number if there is none."""
    return known_user(uid) or str(uid)


def group_name(gid: int) -> str:
    """Returns a group's name, or the number if there is none."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OSError):
        return str(gid)


def named(text: str, indices: Mapping[str, int]) -> str:
    """Replaces user ids and UUIDs in a message of zeusd by names and indices.

    Args:
        text: The message.
        indices: Index of each GPU, by UUID.
    """
    for uuid, index in indices.items():
        text = text.replace(uuid, f"GPU {index}")
    return re.sub(r"\buser ([0-9]+)\b", lambda match: f"user {user_name(int(match[1]))}", text)


def explain(fault: Any, *skip: object) -> str:
    """Describes one of pydantic's errors.

    Args:
        fault: An item of `ValidationError.errors()`.
        skip: Parts of its location that its reader does not know.
    """
    where = ".".join(str(part) for part in fault["loc"] if part not in skip)
    text = re.sub("^Value error, | or (object|instance) .*", "", fault["msg"])
    return f"{where}: {text}" if where else text


def sentence(error: ValidationError) -> str:
    """Describes the first fault of what a user wrote, with its place and value."""
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{where} is missing"
    if fault["type"] == "extra_forbidden":
        return f"there is no setting {where}; check the spelling"
    if fault["type"] == "value_error":
        return explain(fault)
    return f"{explain(fault)}, not {fault['input']!r:.60}"
