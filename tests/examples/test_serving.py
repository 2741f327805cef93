"""examples/serving, as its README starts it, for less time."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest

from tests.examples.programs import EXAMPLES, python, run
from zeus.serving.service import StoredWeights

MODELS = Path(__file__).parents[2] / "zeusd" / "devices" / "simulated" / "models.toml"


def _weights() -> dict[str, dict[float, list[float]]]:
    """What the engine's instructions cost, as if a run had learned it, for any simulated A100."""
    with (EXAMPLES / "serving" / "profile.csv").open() as file:
        cost = {row["instruction"]: float(row["energy"]) for row in csv.DictReader(file)}
    row = [cost["weights"], 0, cost["decode"], 0, 1000 * cost["prefill"] / 4, *[0] * 6, 60.0]
    names = re.findall('^name = "(.*A100.*)"', MODELS.read_text(), re.MULTILINE)
    return {f"{name}|1|example": {0.0: row} for name in names}


ATTEMPTS = 3
"""Runs, of which one must have figures: a busy machine delays steps, and then they are refused."""


def test_the_quickstart_attributes_all_that_was_measured(tmp_path: Path) -> None:
    weights = tmp_path / "weights.json"
    command = python("quickstart.py", "--seconds", "5", "--weights", str(weights))
    for attempt in range(1, ATTEMPTS + 1):
        StoredWeights(weights=_weights()).write(weights)
        ran = run(command, EXAMPLES / "serving", dict(os.environ))
        assert ran.returncode == 0, ran.stderr
        if "large residual" not in ran.stdout or attempt == ATTEMPTS:
            break
    lines = ran.stdout.splitlines()
    sums = re.fullmatch(
        r"requests ([\d.]+) J \+ idle ([\d.]+) J \+ unattributed ([\d.]+) J = measured ([\d.]+) J",
        lines[-2],
    )
    assert sums is not None, lines[-2]
    requests, idle, unattributed, measured = map(float, sums.groups())
    assert requests + idle + unattributed == pytest.approx(measured, abs=0.3)
    assert requests > 10
    rows = [line.split() for line in lines[1:-2]]
    assert sum(float(row[2]) for row in rows) == pytest.approx(requests, rel=0.01)
