"""Adds the energies of several GPUs over the sensor updates of the first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeus_ipc.replies import Sample

GAP_NS = 10**9
"""Longest time between samples of one GPU; a longer one is a gap."""


class Meter:
    """Energy of GPUs that process each step together, from zeusd's samples of each."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = list(gpus)
        self._points: dict[str, deque[tuple[int, float]]] = {gpu: deque() for gpu in gpus}
        self._last: dict[str, Sample] = {}
        self._lead: dict[int, tuple[float, int | None]] = {}
        self.boards_j = dict.fromkeys(gpus, 0.0)
        """Energy of each GPU since its first sample, J, without gaps."""

    def sample(self, one: Sample) -> None:
        """Adds a sample; ignores samples of other GPUs."""
        gpu, t_ns, energy_uj = one.gpu, one.t_ns, one.energy_uj
        if gpu not in self._points:
            return
        last = self._last.get(gpu)
        if last is not None:
            if t_ns <= last.t_ns:
                return
            restarted = one.number <= last.number or energy_uj < last.energy_uj
            if restarted or t_ns - last.t_ns > GAP_NS:
                for points in self._points.values():
                    points.clear()
                self._last.clear()
                self._lead.clear()
            else:
                self.boards_j[gpu] += (energy_uj - last.energy_uj) / 1e6
        self._last[gpu] = one
        self._points[gpu].append((t_ns, energy_uj / 1e6))
        if gpu == self._gpus[0]:
            mhz = one.gpu_clock_mhz
            self._lead[t_ns] = math.nan if mhz is None else float(mhz), one.seen_ns

    def updates(self) -> list[tuple[int, int, float, int, int, float]]:
        """Updates that all GPUs cover, each once, as arguments of `Ledger.update`."""
        found: list[tuple[int, int, float, int, int, float]] = []
        if not self._gpus:
            return found
        lead, *others = (self._points[gpu] for gpu in self._gpus)
        while len(lead) >= 2 and all(points and points[-1][0] >= lead[1][0] for points in others):
            (begin_ns, before_j), (end_ns, after_j) = lead[0], lead[1]
            lead.popleft()
            clock, seen_ns = self._lead.pop(end_ns)
            if any(points[0][0] > begin_ns for points in others):
                continue  # before another GPU's first sample
            joules = after_j - before_j
            for points in others:
                joules += _at(points, end_ns) - _at(points, begin_ns)
                while len(points) > 2 and points[1][0] <= end_ns:
                    points.popleft()
            first = begin_ns if seen_ns is None else max(begin_ns, end_ns - seen_ns)
            found.append((begin_ns, end_ns, max(0.0, joules), first, end_ns, clock))
        return found


def _at(points: deque[tuple[int, float]], t_ns: int) -> float:
    """Energy at an instant, between two samples."""
    before = points[0]
    for point in points:
        if point[0] >= t_ns:
            span = point[0] - before[0]
            share = (t_ns - before[0]) / span if span else 1.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]
