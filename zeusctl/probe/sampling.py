"""Reads sensors in turn at a fixed pace, finds the updates among the readings, and times calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from zeusctl.probe.backend import BackendGpu
from zeusctl.probe.driver import CallError, Clock, Question


class Change(NamedTuple):
    """An observed update.

    Attributes:
        after_ns: The last reading of the value before.
        until_ns: The first reading of the new value.
        value: The new value.
    """

    after_ns: int
    until_ns: int
    value: int

    @property
    def t_ns(self) -> float:
        """The middle of the update's interval."""
        return (self.after_ns + self.until_ns) / 2

    @property
    def width_ns(self) -> int:
        """Length of that interval."""
        return self.until_ns - self.after_ns


class Series:
    """Readings of one sensor, in the order of time.

    Args:
        readings: Time (ns) and value of each.

    Attributes:
        t_ns: When each was taken: midway through the call.
        values: The readings.
        failures: Return codes of readings that failed, and how many had each.
    """

    def __init__(self, readings: Iterable[tuple[int, int]] = ()) -> None:
        self.t_ns: list[int] = []
        self.values: list[int] = []
        self.failures: dict[int, int] = {}
        for t_ns, value in readings:
            self.add(t_ns, value)

    def add(self, t_ns: int, value: int) -> None:
        """Adds a reading."""
        self.t_ns.append(t_ns)
        self.values.append(value)

    def failed(self, code: int) -> None:
        """Counts a reading that failed with a return code."""
        self.failures[code] = self.failures.get(code, 0) + 1

    def changes(self) -> list[Change]:
        """Every observed update."""
        t_ns, values = self.t_ns, self.values
        return [
            Change(t_ns[number - 1], t_ns[number], values[number])
            for number in range(1, len(values))
            if values[number] != values[number - 1]
        ]


PAUSE_S = 0.001
"""Pause after each reading: without it, some drivers fail, and the GPU's work slows down."""


@dataclass(frozen=True)
class Latency:
    """How long one call took, over `calls` calls; microseconds."""

    p50_us: float
    p99_us: float
    max_us: float
    calls: int


def summarize(durations_ns: Sequence[int]) -> Latency | None:
    """Median, 99th percentile (the nearest rank) and maximum; None without calls."""
    if not durations_ns:
        return None
    ordered = sorted(durations_ns)

    def rank(share: float) -> float:
        return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)] / 1000

    return Latency(rank(0.5), rank(0.99), ordered[-1] / 1000, len(ordered))


def sample(
    gpus: Mapping[int, BackendGpu],
    sensors: Mapping[int, Sequence[str]],
    clock: Clock,
    seconds: float,
    meanwhile: Callable[[int], None] = lambda now_ns: None,
) -> dict[int, dict[str, Series]]:
    """Reads each GPU in turn.

    Args:
        gpus: By index.
        sensors: The sensors to read.
        clock: The time.
        seconds: How long.
        meanwhile: Called before each round with the time.

    Returns:
        The readings by index and sensor.
    """
    found = {index: {name: Series() for name in sensors[index]} for index in gpus}
    begin_ns = clock.now_ns()
    while (now_ns := clock.now_ns()) - begin_ns < seconds * 1e9:
        meanwhile(now_ns)
        for index, gpu in gpus.items():
            for name, (t_ns, value) in gpu.read(sensors[index]).items():
                if isinstance(value, CallError):
                    found[index][name].failed(value.code)
                else:
                    found[index][name].add(t_ns, value)
        clock.sleep(PAUSE_S)
    return found


def time_calls(
    questions: Mapping[str, Question], clock: Clock, calls: int
) -> dict[str, Latency | None]:
    """How long each call takes."""
    found = {}
    for name, question in questions.items():
        durations = []
        for _ in range(calls):
            begin_ns = clock.now_ns()
            try:
                question.ask()
            except CallError:
                continue
            finally:
                durations.append(clock.now_ns() - begin_ns)
                clock.sleep(PAUSE_S / 2)
        found[name] = summarize(durations)
    return found


def time_together(
    questions: Mapping[int, Mapping[str, Question]], clock: Clock, calls: int
) -> dict[int, dict[str, Latency | None]]:
    """How long each call takes while one thread per GPU makes calls."""
    with ThreadPoolExecutor(len(questions)) as pool:
        found = pool.map(lambda one: time_calls(one, clock, calls), questions.values())
        return dict(zip(questions, found, strict=True))
