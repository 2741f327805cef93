"""Adds the energies of several GPUs over the sensor updates of the first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from zeus.serving.columns import Updates

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

    def updates(self) -> Updates | None:
        """Updates that all GPUs cover, each once; None: there are none."""
        updates: list[tuple[int, int, float, int, int, float]] = []
        if not self._gpus:
            return None
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
            updates.append((begin_ns, end_ns, max(0.0, joules), first, end_ns, clock))
        return Updates.of(updates) if updates else None


def _at(points: deque[tuple[int, float]], t_ns: int) -> float:
    """Energy at an instant, between two samples."""
    instants_ns, joules = zip(*points, strict=True)
    first_ns = instants_ns[0]
    return float(np.interp(t_ns - first_ns, [at_ns - first_ns for at_ns in instants_ns], joules))
