"""Counts and times the calls of any `Backend`, for the metrics."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.replies import CALL_BUCKETS_S, CallTimes
from zeusd.devices.port import Backend, CallOutcome, DeviceError, Handle

_BOUNDS_NS = tuple(round(bound_s * 1e9) for bound_s in CALL_BUCKETS_S)


class _Calls:
    """Calls of one operation. Concurrent threads may lose a count, but nothing else."""

    __slots__ = ("buckets", "errors", "ns")

    def __init__(self) -> None:
        self.ns = 0
        self.buckets = [0] * (len(_BOUNDS_NS) + 1)
        self.errors: Counter[str] = Counter()


_OF_THE_NODE = frozenset({"init", "shutdown", "driver_version", "device_count", "device_handle"})
"""Calls that may succeed although none about a GPU does."""


class MeteredBackend:
    """Implements `zeusd.devices.port.Backend` with another backend.

    Args:
        nvml: The backend that does the work.

    Attributes:
        failing: Since when all calls about GPUs have failed, although none is lost (CLOCK_MONOTONIC
            time, ns), and the first error; None: one has succeeded since.
        steadily_ns: Since when they have been made, and have failed, without a pause.
    """

    def __init__(self, nvml: Backend) -> None:
        self.failing: tuple[int, DeviceError] | None = None
        self.steadily_ns = self._failed_ns = 0
        self._nvml = nvml
        self._calls: dict[str, _Calls] = {}
        self._wrapped: dict[str, Callable[..., Any]] = {}
        self._reads: dict[Control, Callable[..., Any]] = {}
        self._writes: dict[Control, Callable[..., Any]] = {}

    def read_control(self, gpu: Handle, control: Control) -> ControlValue:
        """Reads a control, counted by control."""
        read = self._reads.get(control)
        if read is None:
            read = self._reads[control] = self._timed(f"get_{control.value}", "read_control")
        value: ControlValue = read(gpu, control)
        return value

    def write_control(self, gpu: Handle, control: Control, value: ControlValue) -> None:
        """Writes a control, counted by control."""
        write = self._writes.get(control)
        if write is None:
            write = self._writes[control] = self._timed(f"set_{control.value}", "write_control")
        write(gpu, control, value)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        timed = self._timed(name, name)
        timed.__name__ = name
        setattr(self, name, timed)  # the next access finds it without calling this method
        return timed

    def _timed(self, operation: str, method: str) -> Callable[..., Any]:
        known = self._wrapped.get(operation)
        if known is not None:
            return known
        nvml = self._nvml
        getattr(nvml, method)  # an unknown method raises AttributeError as usual
        calls = self._calls.setdefault(operation, _Calls())
        buckets, errors, clock_ns = calls.buckets, calls.errors, time.monotonic_ns
        counts = method not in _OF_THE_NODE

        def timed(*arguments: Any) -> Any:
            begin_ns = clock_ns()
            try:
                result = getattr(nvml, method)(*arguments)
            except DeviceError as error:
                errors[error.outcome.value if error.code is None else str(error.code)] += 1
                if counts and error.outcome is CallOutcome.LOST:
                    self.failing = None  # the driver has answered
                elif counts and error.outcome is CallOutcome.TRANSIENT:
                    # Calls further apart than this say nothing of the time between them.
                    if self.failing is None or begin_ns - self._failed_ns > 2_000_000_000:
                        self.steadily_ns = begin_ns
                    self._failed_ns = begin_ns
                    self.failing = self.failing or (begin_ns, error)
                raise
            else:
                if counts:
                    self.failing = None
                return result
            finally:
                took_ns = clock_ns() - begin_ns
                calls.ns += took_ns
                buckets[bisect_left(_BOUNDS_NS, took_ns)] += 1

        self._wrapped[operation] = timed
        return timed

    def describe(self) -> list[CallTimes]:
        """The calls so far."""
        times = []
        for name, calls in sorted(self._calls.items()):
            times.append(
                CallTimes(
                    operation=name,
                    seconds=calls.ns / 1e9,
                    buckets=[*accumulate(calls.buckets)],
                    errors=dict(calls.errors),
                )
            )
        return times
