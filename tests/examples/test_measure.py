"""examples/measure, as its README starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.programs import EXAMPLES, environment, python, run
from tests.support import public_directory, running_daemon

FOLDER = EXAMPLES / "measure"


def counter(zone: Path, name: str) -> None:
    """An energy counter of a CPU, as Linux shows them."""
    zone.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", "0"), ("max_energy_range_uj", "1" * 12)):
        (zone / file).write_text(text)


def test_windows_nest_and_show_every_energy_that_can_be_measured(tmp_path: Path) -> None:
    counter(tmp_path / "intel-rapl:0", "package-0")
    counter(tmp_path / "intel-rapl:0/intel-rapl:0:0", "dram")
    with public_directory() as directory:
        config = directory / "zeusd.toml"
        config.write_text(f'[energy]\npowercap = "{tmp_path}"\n')
        with running_daemon("--simulate", "v100-pcie", "--config", str(config), gpus=1) as daemon:
            log = tmp_path / "energy.csv"
            command = python("measure_block.py", "--gpu", "0", "--steps", "8", "--log-file", log)
            ran = run(command, FOLDER, environment(daemon.socket, PYTHONDEVMODE="1"))
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = dict(line.split(": ") for line in ran.stdout.splitlines() if "step" not in line)
    assert list(lines) == [
        "loading",
        "epoch 1",
        "epoch 2",
        "validation so far",
        "validation",
    ]
    assert all(line.endswith(", CPU 0.0 J, memory 0.0 J") for line in lines.values())

    def energy(line: str) -> float:
        found = re.fullmatch(r"[\d.]+ s, GPU ([\d.]+) ± [\d.]+ J.*", line)
        assert found is not None, line
        return float(found[1])

    steps = [energy(line.split(": ")[1]) for line in ran.stdout.splitlines() if "  step" in line]
    assert len(steps) == 16
    assert sum(steps) == pytest.approx(energy(lines["epoch 1"]) + energy(lines["epoch 2"]), rel=0.1)
    assert 0 < energy(lines["validation so far"]) < energy(lines["validation"])
    assert len(log.read_text().splitlines()) == 1 + 1 + 2 + 16 + 1


def test_errors_are_reported_in_one_sentence() -> None:
    ran = run(python("measure_block.py"), FOLDER, environment("/nowhere"))
    assert ran.returncode == 1
    assert ran.stderr.startswith("measure_block.py: no zeusd listens at /nowhere")
    assert ran.stderr.count("\n") == 1
