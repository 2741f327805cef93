"""zeusd and `zeusd restore` start on any damaged journal, and write nothing that is wrong.

`test_records.py` shows that a damaged byte costs at most one record, for every byte; here each
record in turn is the one.
"""

from __future__ import annotations

import errno
import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests import seeds
from tests.zeusd.core.world import GPU0, GPU1, World
from zeus_ipc.controls import Control, ControlValue
from zeusd import restore, restore_drivers
from zeusd.core.entries import PendingRestore
from zeusd.core.model import ProcessIdentity
from zeusd.identity import boot_id, driver_id
from zeusd.records import Entry, header, record
from zeusd.runtime.journal import Journal

DEAD = ProcessIdentity(2**22 + 1, 1)
LIMIT, CLOCKS = Control.POWER_LIMIT, Control.GPU_CLOCKS


def pending(gpu: str, control: Control, target: ControlValue, *values: ControlValue) -> Entry:
    return PendingRestore(gpu, control, DEAD, 1000, "", 1, 15_000_000_000, target, values).to_json()


CHANGES: list[tuple[str, Entry | None]] = [
    ("driver", {"id": driver_id(), "settle_s": 5.0}),
    (f"observed/{GPU0}/power_limit", {"value": [300_000]}),
    (f"initial/{GPU0}/power_limit", {"value": [300_000]}),
    (f"pending/{GPU0}/power_limit", pending(GPU0, LIMIT, (300_000,), (300_000,), (150_000,))),
    (f"pending/{GPU0}/gpu_clocks", pending(GPU0, CLOCKS, (), (), (600, 900))),
    (f"observed/{GPU1}/power_limit", {"value": [300_000]}),
    (f"pending/{GPU1}/power_limit", pending(GPU1, LIMIT, (300_000,), (300_000,), (120_000,))),
    (f"pending/{GPU1}/power_limit", pending(GPU1, LIMIT, (300_000,), (120_000,), (140_000,))),
    (f"pending/{GPU1}/gpu_clocks", pending(GPU1, CLOCKS, (), (), (600, 900))),
    (f"pending/{GPU1}/gpu_clocks", None),
]

# The values of the devices, and the allowed ones after a start: the same, or the target.
HELD: dict[tuple[str, Control], ControlValue] = {
    (GPU0, LIMIT): (150_000,),
    (GPU0, CLOCKS): (600, 900),
    (GPU1, LIMIT): (140_000,),
    (GPU1, CLOCKS): (),
}
TARGETS: dict[tuple[str, Control], ControlValue] = {
    (GPU0, LIMIT): (300_000,),
    (GPU0, CLOCKS): (),
    (GPU1, LIMIT): (300_000,),
    (GPU1, CLOCKS): (),
}


def write_journal(directory: Path, damaged: int | None) -> None:
    """A journal of which one part is damaged at a random byte; part 0 is the first line."""
    seed = seeds.fresh()
    rng = random.Random(seed)
    parts = [header(boot_id()), *(record(boot_id(), key, entry) for key, entry in CHANGES)]
    if damaged is not None:
        part = bytearray(parts[damaged])
        part[rng.randrange(1, len(part) - 1)] ^= 1 << rng.randrange(8)
        parts[damaged] = bytes(part)
    directory.chmod(0o700)
    (directory / "journal").write_bytes(b"".join(parts))
    (directory / "journal").chmod(0o600)


def check(values: dict[tuple[str, Control], ControlValue], damaged: int | None) -> None:
    for what, value in values.items():
        assert value in (HELD[what], TARGETS[what]), f"{what} holds {value}"
    spared = [what for what, value in values.items() if value != TARGETS[what]]
    if damaged is None or damaged == 0 or not CHANGES[damaged - 1][0].startswith("pending/"):
        assert spared == []
    else:
        gpu, _, control = CHANGES[damaged - 1][0].removeprefix("pending/").partition("/")
        assert {*spared} <= {(gpu, Control(control))}, "the others are restored"


DAMAGES = [None, *range(len(CHANGES) + 1)]


@pytest.mark.parametrize("damaged", DAMAGES)
def test_zeusd_starts_and_restores_all_else(
    tmp_path: Path, damaged: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(limits_mw=(300_000, 300_000))
    world.driver = driver_id()
    world.values |= HELD
    write_journal(tmp_path, damaged)
    before = (tmp_path / "journal").read_bytes()
    journal = Journal(tmp_path, "journal", boot_id())
    with caplog.at_level(logging.WARNING):
        world.journal = {key: entry.to_json() for key, entry in journal.open().items()}
    journal.close()
    world.start_core(alive=set())
    check({what: world.values[what] for what in HELD}, damaged)
    told = [one for one in caplog.records if one.__dict__.get("event") == "quarantined"]
    if damaged is None:
        assert caplog.records == []
        return
    assert len(told) == len(caplog.records) == 1, "one line of the log"
    (aside,) = tmp_path.glob("journal.bad-*")
    assert aside.read_bytes() == before, "nothing is dropped without a trace"
    again = Journal(tmp_path, "journal", boot_id())
    again.open()
    again.close()
    assert len([*tmp_path.glob("journal.bad-*")]) == 1, "it is whole again"


class Devices:
    """Replaces the driver: reads `HELD`, and records writes."""

    def __init__(self) -> None:
        self.values = dict(HELD)

    def shutdown(self) -> None:
        """Nothing is open."""

    def handle(self, uuid: str) -> str:
        return uuid

    def read_control(self, gpu: str, control: Control) -> ControlValue:
        return self.values[(gpu, control)]

    def write_control(self, gpu: str, control: Control, value: ControlValue) -> None:
        self.values[(gpu, control)] = value


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    monkeypatch.setattr(restore_drivers, "_Nvml", lambda library: devices)
    return devices


@pytest.mark.parametrize("damaged", DAMAGES)
def test_the_helper_starts_and_restores_all_else(
    tmp_path: Path, devices: Devices, damaged: int | None
) -> None:
    write_journal(tmp_path, damaged)
    said: list[str] = []
    assert restore.restore([str(tmp_path)], say=said.append) == 0
    check(devices.values, damaged)
    assert sum("damaged" in line for line in said) == (damaged is not None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_the_helper_restores_although_it_can_write_nothing(
    tmp_path: Path, devices: Devices, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(tmp_path, None)
    real_open = os.open

    def no_writes(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        there = os.path.exists(path)
        if flags & (os.O_WRONLY | os.O_RDWR) or (flags & os.O_CREAT and not there):
            raise OSError(number, os.strerror(number))
        return real_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_writes)
    said: list[str] = []
    assert restore.restore([str(tmp_path)], say=said.append) == 0
    assert devices.values == TARGETS
    lines = [line for line in said if "cannot be written" in line]
    announced, kept = lines[0], [line.rpartition("so it keeps ")[2] for line in lines]
    assert said[0] == announced, "what is written next is recorded before the driver is called"
    assert announced.endswith(f"so it keeps pending/{GPU1}/power_limit")
    assert len(kept) == len({*kept}) == 3, "each restore is named once"
    assert restore.restore([str(tmp_path)], say=said.append) == 0
    assert devices.values == TARGETS


def test_the_helper_leaves_what_it_does_not_understand(tmp_path: Path, devices: Devices) -> None:
    write_journal(tmp_path, None)
    strange = {"gpu": GPU1, "control": "fan_speed", "holder": [1, 1]}
    with (tmp_path / "journal").open("ab") as file:
        file.write(record(boot_id(), f"pending/{GPU1}/fan_speed", strange))
        unused = pending(GPU1, Control.MEMORY_CLOCKS, ())  # its lease was acquired, and not used
        file.write(record(boot_id(), f"pending/{GPU1}/memory_clocks", unused))
    said: list[str] = []
    assert restore.restore([str(tmp_path)], say=said.append) == 1
    assert any("fan_speed is not understood" in line for line in said)
    assert f"memory_clocks of {GPU1}: was never changed" in said
    assert devices.values == TARGETS
