from __future__ import annotations

import threading

import pytest

from zeus_ipc.errors import ErrorCode
from zeusd.core.model import Failure
from zeusd.runtime import historian as module
from zeusd.runtime.historian import Answer, Historian, LookUp, WindowsQuery
from zeusd.runtime.sampler import Sampler

LOOK_UPS = 30_000
"""A wait that does not end at its timeout is met once in some thousand."""


def test_a_source_that_shows_nothing_is_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait ends, even a short one, also for requests made while another was answered."""
    monkeypatch.setattr(module, "PATIENCE_NS", -299_990_000)  # three ticks less: 10 µs
    # Over before it begins, as on a busy machine.
    monkeypatch.setattr(Historian, "_timeout_s", lambda self: 1e-9 if self._give_up else None)
    historian = Historian(Sampler(lambda name: None, lambda name, sample: None))
    answers: list[Answer] = []
    all_answered = threading.Event()

    def ask() -> None:
        historian.submit(LookUp(("GPU-1",), WindowsQuery(()), answered))

    def answered(look_up: LookUp) -> None:
        answers.append(look_up.results["GPU-1"])
        if len(answers) < LOOK_UPS:
            ask()
        else:
            all_answered.set()

    ask()
    assert all_answered.wait(30), f"{len(answers)} of {LOOK_UPS} were answered"
    assert all(isinstance(one, Failure) and one.code is ErrorCode.NOT_SUPPORTED for one in answers)
    historian.stop()
