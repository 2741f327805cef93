"""Puts a simulated node into each state of the runbook, and compares the output with the page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages.following import DOCS, shapes
from tests.preloaded import Program
from tests.snippets import every
from tests.support import RunningDaemon, running_daemon, script, wait_for
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeusctl.cli import main
from zeusd.devices.simulated.node import CALLS

PAGE = DOCS / "operate" / "incident.md"
_WORKLOAD = "nsdi23/v100/imagenet/resnet50/adadelta/32"
_UNKNOWN, _LOST = 999, 15
_ABOUT_THE_NODE = {"init", "shutdown", "driver_version", "device_count"}


@dataclass(frozen=True)
class Command:
    """A command of the page, and its output there."""

    line: int
    text: str
    shown: str


def _commands() -> dict[str, list[Command]]:
    """By the heading they stand under."""
    headings: list[tuple[int, str]] = []
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("## "):
            headings.append((number, line[3:]))
    found: dict[str, list[Command]] = {name: [] for _, name in headings}
    for block in every(PAGE):
        if block.language == "console":
            section = [name for number, name in headings if number < block.line][-1]
            for one in re.split(r"^\$ ", block.source, flags=re.MULTILINE)[1:]:
                text, _, shown = one.partition("\n")
                found[section].append(Command(block.line, text, shown))
    return found


COMMANDS = _commands()


class Scene:
    """Four busy GPUs, and the events that affect them."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.daemon = daemon
        self.client = daemon.client()
        info = self.client.node()
        assert info.simulated is not None
        self.gpus = [gpu.uuid for gpu in info.gpus]
        self.devices = SimulatedNode(info.simulated)
        self.work = [SimulatedWork(info.simulated, [gpu], _WORKLOAD) for gpu in self.gpus]
        for work in self.work:
            work.launch(1e6)
        self.holders: list[Program] = []

    def hold(self, setting: str) -> Program:
        """A process that holds a lease, like a job."""
        program = "from zeus_ipc import Client\nclient = Client()\n"
        program += "gpus = [gpu.uuid for gpu in client.node().gpus]\n"
        program += f"client.{setting}\nprint('held', flush=True)\ninput()\n"
        holder = script(program, env={**os.environ, "ZEUSD_SOCK_PATH": self.daemon.socket})
        self.holders.append(holder)
        assert holder.stdout.readline() == "held\n"
        return holder

    def kill(self, holder: Program) -> None:
        holder.kill()
        holder.communicate()

    def events(self, event: str) -> int:
        return sum(record.event == event for record in self.client.audit().records)

    def run(self, command: Command, pid: int | None = None) -> None:
        """Runs it. The output must contain the lines on the page."""
        text = re.sub(r"--pid \d+", f"--pid {pid}", command.text)
        words = [word for word in shlex.split(text) if word != "sudo"]
        assert words[0] == "zeusctl"
        output = io.StringIO()
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            pytest.raises(SystemExit),
        ):
            main(["--socket", self.daemon.socket, *words[1:]])
        printed = shapes(output.getvalue())
        for one in shapes(command.shown):
            assert one in printed, (
                f"{PAGE.name}:{command.line}: {one!r} is not in\n{output.getvalue()}"
            )

    def follow(self, section: str, pid: int | None = None) -> None:
        for command in COMMANDS[section]:
            self.run(command, pid)

    def close(self) -> None:
        for holder in self.holders:
            if holder.poll() is None:
                self.kill(holder)
        self.client.close()
        self.devices.close()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with running_daemon("--simulate", "4xv100-pcie", gpus=4) as daemon:
        made = Scene(daemon)
        try:
            yield made
        finally:
            made.close()


def _clock_is(scene: Scene, gpu: int, wanted: Callable[[int], bool]) -> None:
    def there() -> bool:
        state = scene.client.state([scene.gpus[gpu]])[scene.gpus[gpu]]
        return state.gpu_clock_mhz is not None and wanted(state.gpu_clock_mhz)

    wait_for(there, f"GPU {gpu}'s clock")


def test_someone_holds_it(scene: Scene) -> None:
    holder = scene.hold("set_power_limit([gpus[0]], 125_000)")
    _clock_is(scene, 0, lambda mhz: mhz < 900)
    scene.follow("First look")
    scene.follow("A job holds a lease", holder.pid)
    assert not scene.client.leases()
    scene.kill(holder)


def test_a_ceiling(scene: Scene) -> None:
    scene.client.set_ceiling([scene.gpus[1]], "job:77", 150_000)
    _clock_is(scene, 1, lambda mhz: mhz < 1200)
    scene.follow("A ceiling")


def test_set_outside_zeusd(scene: Scene) -> None:
    scene.devices.set_outside(1, 150_000)
    wait_for(lambda: scene.events("outside_change"), "the record of it", 15.0)
    holder = scene.hold("set_power_limit([gpus[2]], 200_000)")
    scene.devices.set_outside(2, 150_000)
    scene.kill(holder)
    wait_for(lambda: scene.events("outside_change") > 1, "the record of the other one")
    wait_for(lambda: not scene.client.leases(), "the lease's end")
    scene.follow("Set outside zeusd")


def test_locked_clocks(scene: Scene) -> None:
    holder = scene.hold("set_gpu_clocks([gpus[2]], 600, 900)")
    gpu, of_lock = scene.gpus[2], 0x2  # its power limit has throttled it, too
    wait_for(lambda: scene.client.state([gpu])[gpu].throttle_reasons == of_lock, "the lock alone")
    scene.follow("Locked clocks")
    scene.kill(holder)
    wait_for(lambda: not scene.client.leases(), "the lease's end")


def test_pending_restore(scene: Scene) -> None:
    holder = scene.hold("set_power_limit([gpus[3]], 125_000)")
    scene.devices.inject(3, "set_power_limit", _UNKNOWN)
    scene.kill(holder)
    wait_for(lambda: scene.events("restore_failed"), "the driver to refuse")
    look, doctor, *after = COMMANDS["Pending restore"]
    scene.run(look)
    scene.run(doctor)
    scene.devices.clear_faults()
    for command in after:
        scene.run(command)


def test_a_lost_gpu(scene: Scene) -> None:
    calls = CALLS - _ABOUT_THE_NODE
    for call in calls:
        scene.devices.inject(3, call, _LOST)
    wait_for(lambda: scene.client.node().problems, "the lack of samples")
    look, refused, quiesce, resume = COMMANDS["A lost GPU"]
    scene.run(look)
    scene.run(refused)
    scene.run(quiesce)
    scene.devices.clear_faults()
    scene.run(resume)


def test_zeusd_is_down(scene: Scene) -> None:
    scene.client.close()
    scene.daemon.kill()
    scene.follow("zeusd is down")


def test_every_section_is_tried() -> None:
    tried = Path(__file__).read_text(encoding="utf-8")
    for section, commands in COMMANDS.items():
        assert not commands or f'"{section}"' in tried, section
