"""The units of zeus-fleet: the programs that they start, and the variables of their file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zeus_fleet.commands import main

FOLDER = Path(__file__).parents[2] / "systemd" / "fleet"
UNITS = sorted(FOLDER.glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_needs_no_options(unit: Path) -> None:
    text = unit.read_text()
    (name,) = re.findall(r"^ExecStart=@PREFIX@/bin/zeus-fleet (\w+)$", text, re.MULTILINE)
    assert unit.stem == f"zeus-fleet-{name}"
    assert not [one.name for one in main.commands[name].params if one.required]
    for line in (
        "User=zeus-fleet",
        "CapabilityBoundingSet=",
        "EnvironmentFile=/etc/zeusd/fleet.env",
    ):
        assert line in text.splitlines()


def test_the_variables_are_those_of_the_options() -> None:
    named = set(re.findall(r"^#?([A-Z_]+)=", (FOLDER / "fleet.env").read_text(), re.MULTILINE))
    known = {option.envvar for command in main.commands.values() for option in command.params}
    assert len(named) > 5
    assert named <= known
    assert {unit.stem.rpartition("-")[2] for unit in UNITS} == {"node", "allocate", "serve"}
