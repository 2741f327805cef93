"""Writes the reports in docs/reference/hardware that need no hardware again.

python -m tests.zeusctl.probe.ship
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.snippets import ROOT
from tests.zeusctl.probe.stand_in import START_NS, probed
from zeusctl.probe.run import ProbeTiming, probe
from zeusctl.probe.simulated import ProbedSimulation

HARDWARE = ROOT / "docs" / "reference" / "hardware"

A100: dict[str, Any] = {
    "name": "NVIDIA A100-SXM4-80GB",
    "architecture": 7,
    "memory_mib": 81920,
    "limit_mw": 400_000,
    "limit_min_mw": 100_000,
    "limit_max_mw": 400_000,
    "limit_default_mw": 400_000,
    "clock_top": 1410,
    "clock_step": 15,
    "clock_count": 81,
    "memory_clock": 1593,
    "tick_us": 100_900,
    "window_us": 25_000,
    "jitter_us": 500,
    "counter_windowed": 1,
    "start_ns": START_NS + 12_345_678,
    "load_mw": 390_000,
    "idle_mw": 62_000,
}
"""A stand-in that is set as the table and the literature have this product."""


def reports() -> dict[str, str]:
    """Each report's text, by its path below docs/reference/hardware."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        stand_in = probed(Path(folder), patch, A100, plan=ProbeTiming(), load=True)
    driver = ProbedSimulation("h100-sxm:seed=1")
    simulated = probe(driver, ProbeTiming(calls=1), load_on=driver.load_on)
    return {
        "stand-in/a100-sxm-80.json": stand_in.to_json(),
        "simulated/h100-sxm.json": simulated.to_json(),
    }


if __name__ == "__main__":
    for path, text in reports().items():
        (HARDWARE / path).write_text(text + "\n")
