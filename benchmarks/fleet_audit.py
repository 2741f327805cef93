"""Every change of a limit, and the sum at any time, from the calls to the GPUs' drivers.

The stand-in for NVIDIA's library records each call that sets a limit, with its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tests.fake_nvml.double import NvmlDouble


class Change(NamedTuple):
    """A GPU holds another limit from a time on, s since 1970."""

    at_s: float
    node: int
    gpu: int
    watts: float


class Excess(NamedTuple):
    """A period in which the sum of all limits was above the bound."""

    at_s: float
    held_w: float
    allowed_w: float


def changes(nodes: Sequence[NvmlDouble]) -> list[Change]:
    """All changes by time."""
    offset_s = time.time() - time.monotonic()
    found = [
        Change(call.t_ns / 1e9 + offset_s, node, call.gpu, call.arguments[0] / 1000)
        for node, gpus in enumerate(nodes)
        for call in gpus.calls("nvmlDeviceSetPowerManagementLimit")
        if call.result == 0
    ]
    return sorted(found, key=lambda one: one.at_s)


def excesses(
    found: Iterable[Change], allowed_w: Callable[[float], float], since_s: float
) -> tuple[list[Excess], float]:
    """Finds when the sum was above the bound, and the largest ratio of sum to bound.

    A bound that falls is checked at the next change: pass it as a change of 0 W.

    Args:
        found: Changes by time, from the start of each zeusd on.
        allowed_w: The bound at a time.
        since_s: Start of the check.
    """
    limits: dict[tuple[int, int], float] = {}
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
    limits: dict[tuple[int, int], float] = {}
    sums = [0.0] * nodes
    lines: list[list[tuple[float, float]]] = [[] for _ in range(nodes)]
    for change in found:
        key = change.node, change.gpu
        sums[change.node] += change.watts - limits.get(key, 0.0)
        limits[key] = change.watts
        lines[change.node].append((change.at_s, sums[change.node]))
    return lines


def total_of(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The sum of all nodes' limits from each time on, W."""
    changes = sorted((at, node, watts) for node, line in enumerate(lines) for at, watts in line)
    held, total, found = [0.0] * len(lines), 0.0, []
    for at, node, watts in changes:
        total += watts - held[node]
        held[node] = watts
        found.append((at, total))
    return found
