"""The offset of the time since the epoch."""

from __future__ import annotations

import itertools
import time

import pytest

from zeus_common.epoch import offset_ns

EPOCH_NS = 1_700_000_000 * 10**9


@pytest.mark.parametrize("held_up", range(6))
def test_a_pause_between_the_clocks_does_not_count(
    held_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    now_ns = 0

    def monotonic_ns() -> int:
        nonlocal now_ns
        now_ns += 10**9 if next(calls) == held_up else 100
        return now_ns

    monkeypatch.setattr(time, "monotonic_ns", monotonic_ns)
    monkeypatch.setattr(time, "time_ns", lambda: EPOCH_NS + now_ns)
    assert offset_ns() == pytest.approx(EPOCH_NS, rel=0, abs=100)
