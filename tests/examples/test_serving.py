"""examples/serving, as its README starts it, for less time."""

from __future__ import annotations

import os
import re

import pytest

from tests.examples.programs import EXAMPLES, python, run


def test_the_quickstart_attributes_all_that_was_measured() -> None:
    command = python("quickstart.py", "--seconds", "3", "--method", "tokens")
    ran = run(command, EXAMPLES / "serving", dict(os.environ))

    assert ran.returncode == 0, ran.stderr
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
