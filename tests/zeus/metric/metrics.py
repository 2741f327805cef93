"""Metrics of windows, and their pushes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.zeus.gateway import Double, Series
from tests.zeus.node import VirtualNode
from zeus.metric import EnergyCumulativeCounter, EnergyHistogram, Metric, PowerGauge

OpenNode = Callable[[str], VirtualNode]


IDLE_W = 26.0
"""A V100 that nothing runs on."""

GPU_J = "energy_monitor_gpu_energy_joules"
POWER_W = "power_monitor_gpu_power_watts"


def histogram(address: str, job: str = "j", **options: Any) -> EnergyHistogram:
    return EnergyHistogram([], None, address, job, **options)


def counter(address: str, job: str = "j") -> EnergyCumulativeCounter:
    return EnergyCumulativeCounter([], None, 0.03, address, job)


def gauge(address: str, job: str = "j", period_s: float = 0.03) -> PowerGauge:
    return PowerGauge(None, period_s, address, job)


def spend(node: VirtualNode, one: Metric, name: str, seconds: float) -> None:
    one.begin_window(name)
    node.clock.sleep(seconds)
    one.end_window(name)


def totals(double: Double, kind: str) -> list[float]:
    """The value of a counter, to the microjoule."""
    found = Series(pushed(double, "energy_counter"))
    return [round(joules, 6) for joules in found.of(f"energy_monitor_{kind}_energy_joules_total")]


def pushed(double: Double, kind: str) -> str:
    """The newest body that a kind of metric pushed."""
    return next((body for path, body in reversed(double.pushes) if f"/{kind}/" in path), "")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def threads() -> set[threading.Thread]:
    """Those of all metrics."""
    return {one for one in threading.enumerate() if one.name == "zeus-metric"}
