"""Timelines from zeusd's history, in seconds since the epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeus.exceptions import from_ipc
from zeus_common.epoch import offset_ns
from zeus_ipc.errors import ZeusIpcError

if TYPE_CHECKING:
    from zeus_ipc.client import Client


class Timelines:
    """Reads timelines of GPUs, or of CPUs.

    Args:
        sources: Of each index, the source: a GPU's UUID, `cpu:0`, `dram:0`.
        kind: What the indices count: "GPU" or "CPU".
    """

    def __init__(
        self,
        client: Client | None,
        sources: dict[int, str],
        update_period: float | None,
        max_samples: int | None,
        kind: str = "GPU",
    ) -> None:
        if update_period is not None and not 0 < update_period < math.inf:
            raise ValueError(f"update_period must be a positive number of s, not {update_period}")
        if max_samples is not None and max_samples <= 0:
            raise ValueError(f"max_samples_per_{kind.lower()} must be positive, not {max_samples}")
        self._client = client
        self._sources = sources
        self._kind = kind
        self._period_ns = None if update_period is None else round(update_period * 1e9)
        self._max_samples = max_samples
        self._begin_s = time.time()

    def read(
        self,
        domain: str,
        index: int | None,
        start_time: float | None,
        end_time: float | None,
    ) -> dict[int, list[tuple[float, int]]]:
        """Samples of a domain (see `zeus_ipc.requests.Domain`) of one index, or of all.

        The default start is when the monitor was created; zeusd keeps earlier samples, too.

        Raises:
            ValueError: A time is not finite, or the index is not monitored.
        """
        start_s = self._begin_s if start_time is None else start_time
        return {
            one: self._thinned(self._ask(self._sources[one], domain, start_s, end_time))
            for one in self._chosen(index)
        }

    def at(self, domain: str, at_time: float | None) -> dict[int, int] | None:
        """The newest reading of each index at a time; None if one of them has none."""
        newest: dict[int, int] = {}
        until_s = time.time() if at_time is None else at_time
        for index, source in self._sources.items():
            # Maximum age of a present reading.
            samples = self._ask(source, domain, until_s - 5.0, until_s)
            if not samples:
                return None
            newest[index] = samples[-1][1]
        return newest

    def _chosen(self, index: int | None) -> Sequence[int]:
        if index is None:
            return list(self._sources)
        if index not in self._sources:
            known = list(self._sources)
            raise ValueError(f"{self._kind} {index} is not monitored; these are: {known}")
        return [index]

    def _ask(
        self, source: str, domain: str, start_s: float, end_s: float | None
    ) -> list[tuple[float, int]]:
        for name, time_s in (("start_time", start_s), ("end_time", end_s)):
            if time_s is not None and not math.isfinite(time_s):
                raise ValueError(f"{name} must be seconds since the epoch, not {time_s}")
        shift_ns = offset_ns()
        end_ns = None if end_s is None else round(end_s * 1e9) - shift_ns
        assert self._client is not None  # there is this source
        try:
            points = self._client.timeline(source, domain, round(start_s * 1e9) - shift_ns, end_ns)
        except ZeusIpcError as error:
            raise from_ipc(error) from error
        return [((t_ns + shift_ns) / 1e9, value) for t_ns, value in points]

    def _thinned(self, samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
        if self._period_ns is not None:
            kept: list[tuple[float, int]] = []
            for sample in samples:
                if not kept or (sample[0] - kept[-1][0]) * 1e9 >= 0.95 * self._period_ns:
                    kept.append(sample)
            samples = kept
        return samples if self._max_samples is None else samples[-self._max_samples :]
