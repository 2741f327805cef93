"""Reads sensors in turn at a fixed pace, and times calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from zeusctl.probe.backend import BackendGpu
from zeusctl.probe.driver import CallError, Clock, Question
from zeusd.energy.probed.report import Latency
from zeusd.energy.probed.sensor import summarize
from zeusd.energy.probed.series import ReadingSeries

PAUSE_S = 0.001
"""Pause after each reading: without it, some drivers fail, and the GPU's work slows down."""


def sample(
    gpus: Mapping[int, BackendGpu],
    sensors: Mapping[int, Sequence[str]],
    clock: Clock,
    seconds: float,
    meanwhile: Callable[[int], None] = lambda now_ns: None,
) -> dict[int, dict[str, ReadingSeries]]:
    """Reads each GPU in turn.

    Returns:
        The readings by index and sensor.
    """
    found = {index: {name: ReadingSeries() for name in sensors[index]} for index in gpus}
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
