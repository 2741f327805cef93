"""Every change of a limit, and the sum at any time, by the audit logs of all zeusds.

A limit counts from when a ceiling allows it, and until the lower one has been read back: what may
be in hardware at worst. Written out by `zeusd serve --log-format json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple


class Change(NamedTuple):
    """A GPU may hold another limit from a time on, s since 1970."""

    at_s: float
    node: int
    gpu: str
    watts: float


class Excess(NamedTuple):
    """The sum of all limits was above what is allowed."""

    at_s: float
    held_w: float
    allowed_w: float


def changes(logs: Sequence[Path]) -> list[Change]:
    """All changes by time; node is the position of its log."""
    found = [one for node, log in enumerate(logs) for one in _of_node(node, log)]
    return sorted(found, key=lambda one: one.at_s)


def excesses(
    found: Iterable[Change], allowed_w: Callable[[float], float], since_s: float
) -> tuple[list[Excess], float]:
    """When the sum was above what was allowed, and the largest share of it that was held.

    A bound that falls is looked at with the next change: give it as a change of its own, of 0 W.

    Args:
        found: Changes by time, from the start of each zeusd on.
        allowed_w: What all may hold at a time.
        since_s: Before this nothing is checked.
    """
    limits: dict[tuple[int, str], float] = {}
    above, most = [], 0.0
    for change in found:
        limits[change.node, change.gpu] = change.watts
        if change.at_s < since_s:
            continue
        held, allowed = sum(limits.values()), allowed_w(change.at_s)
        most = max(most, held / allowed)
        if held > allowed:
            above.append(Excess(change.at_s, held, allowed))
    return above, most


def of_nodes(found: Iterable[Change], nodes: int) -> list[list[tuple[float, float]]]:
    """The sum of each node's limits from each time on, W."""
    limits: dict[tuple[int, str], float] = {}
    sums = [0.0] * nodes
    lines: list[list[tuple[float, float]]] = [[] for _ in range(nodes)]
    for change in found:
        key = change.node, change.gpu
        sums[change.node] += change.watts - limits.get(key, 0.0)
        limits[key] = change.watts
        lines[change.node].append((change.at_s, sums[change.node]))
    return lines


def _of_node(node: int, log: Path) -> Iterable[Change]:
    ceilings: dict[str, float] = {}
    limits: dict[str, float] = {}
    for line in log.read_text(errors="replace").splitlines():
        if '"power_limit"' not in line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # zeusd was killed meanwhile
            continue
        event, gpu = row["event"], row["gpu"]
        if event in ("ceiling_set", "ceiling_expired") and row["reason"] == "fleet":
            ceilings[gpu] = _watts(row["new"])
        elif event == "restore" and row["result"] == "ok":
            limits[gpu] = _watts(row["new"])
        else:
            continue
        held = max(ceilings.get(gpu, 0.0), limits.get(gpu, 0.0))
        at = datetime.fromisoformat(row["time"].replace("Z", "+00:00"))
        yield Change(at.timestamp(), node, gpu, held)


def _watts(text: str) -> float:
    return float(text.removesuffix(" W"))
