"""Clocks through a real zeusd or without one, and failures of both."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support import (
    TIMEOUT_S,
    RunningDaemon,
    as_nobody,
    configuration,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from tests.zeus.node import VirtualNode
from zeus import _node
from zeus.optimizer.pipeline_frequency import frequency_controller
from zeus.optimizer.pipeline_frequency.frequency_controller import FrequencyController
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeus_ipc import Client, prepared

OpenNode = Callable[[str], VirtualNode]
WORKLOAD = "perseus/a100/gpt3-175b/stage0"
NODE = "2xa100:setter_ms=1,a100:unprivileged,v100"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequency_controller, "LOOK_S", 0.05)
    monkeypatch.setattr(frequency_controller, "RETRY_S", (0.05, 0.1))


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with public_directory() as directory:
        open_to_all = configuration(directory)
        with running_daemon(
            "--simulate", NODE, "--socket-mode", "666", *open_to_all, gpus=4, directory=directory
        ) as running:
            yield running


@pytest.fixture
def zeus(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, fast: None
) -> Iterator[RunningDaemon]:
    """The daemon, and `zeus` of this process uses it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with Client(daemon.socket) as client, _node.use(client):
        yield daemon


class Gpu:
    """One GPU of a daemon, as someone else sees it; it works all the time."""

    def __init__(self, daemon: RunningDaemon, index: int = 0) -> None:
        self.index = index
        self.client = daemon.client()
        node = self.client.node()
        self.uuid = node.gpus[index].uuid
        assert node.simulated is not None
        self.work = SimulatedWork(node.simulated, [self.uuid], WORKLOAD)
        self.work.launch(1e6, "forward")
        self.devices = SimulatedNode(node.simulated)
        self.controllers: list[FrequencyController] = []

    def controller(self) -> FrequencyController:
        """One that sets its clocks until the test ends."""
        self.controllers.append(FrequencyController(self.index))
        return self.controllers[-1]

    def mhz(self) -> int:
        clock = self.client.state(self.uuid)[self.uuid].gpu_clock_mhz
        assert clock is not None
        return clock

    def leases(self) -> list[str]:
        return [lease.control for lease in self.client.leases() if lease.gpu == self.uuid]

    def becomes(self, mhz: int) -> None:
        wait_for(lambda: self.mhz() == mhz, f"the clock to become {mhz}, not {self.mhz()}")

    def is_set_again_by(self, controller: FrequencyController) -> None:
        """Waits until two instructions set it: nobody waits for a set, so the clock is read before
        the next two.
        """

        def back() -> bool:
            if self.mhz() == 1200:
                return True
            controller.set_frequency(900)
            controller.set_frequency(1200)
            return False

        wait_for(back, "the clock to be set again")

    def close(self) -> None:
        for controller in self.controllers:
            controller.end()
        self.work.close()
        self.devices.close()
        self.client.close()


@pytest.fixture
def gpu(zeus: RunningDaemon) -> Iterator[Gpu]:
    made = Gpu(zeus)
    yield made
    made.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_clocks_are_set_and_restored(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    controller = gpu.controller()
    assert controller.working
    assert controller.supported[0] == 1410
    assert controller.model == "NVIDIA A100-SXM4-80GB"
    assert gpu.leases() == ["gpu_clocks"]
    for mhz in (900, 1200, 900):
        controller.set_frequency(mhz)
        gpu.becomes(mhz)
    controller.set_frequency(0)
    controller.set_frequency(1005)
    gpu.becomes(1005)
    controller.reset()
    gpu.becomes(1410)
    controller.set_frequency(1005)
    gpu.becomes(1005)
    controller.end()
    assert gpu.leases() == []
    gpu.becomes(1410)
    controller.end()
    controller.set_frequency(900)
    controller.reset()
    assert not controller.hold(900)
    assert warnings(caplog) == []


def test_of_many_clocks_the_last_counts(gpu: Gpu) -> None:
    controller = gpu.controller()
    clocks = [mhz for mhz in controller.supported if mhz >= 600]
    controller.prepare(clocks)
    chance = random.Random(3)
    last = 0
    for _ in range(2000):
        last = chance.choice(clocks)
        controller.set_frequency(last)
        time.sleep(0.0005)
    # On a busy machine there may have been no room for it: an instruction that follows sends it.
    wait_for(lambda: controller.set_frequency(last) or gpu.mhz() == last, "it to be in force")
    assert controller.working


def test_a_message_that_could_not_be_sent_is_sent_with_the_next_instruction(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = gpu.controller()
    controller.prepare([900])
    with monkeypatch.context() as full:
        full.setattr(prepared.PreparedClocks, "lock", lambda *_: False)
        controller.set_frequency(900)
    controller.set_frequency(900)
    gpu.becomes(900)


def test_clocks_that_came_too_late_are_set_with_the_next_instruction(
    gpu: Gpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after this process was stopped for a while: nobody needs to do anything about it."""
    controller = gpu.controller()
    monkeypatch.setattr(prepared, "VALID_NS", -1)
    controller.prepare([900])
    controller.set_frequency(900)
    wait_for(lambda: controller._last == 0, "zeusd to say that it was late")
    assert gpu.mhz() == 1410
    monkeypatch.undo()

    def set_again() -> bool:
        controller.set_frequency(900)
        return gpu.mhz() == 900

    wait_for(set_again, "the clock to be set")
    assert controller.working
    assert warnings(caplog) == []


def test_holding_waits_until_the_clock_is_in_force(gpu: Gpu) -> None:
    assert gpu.controller().hold(915)
    assert gpu.mhz() == 915


def test_a_clock_that_the_gpu_does_not_offer_is_the_nearest(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    controller = gpu.controller()
    for asked, set_to in ((907, 900), (1409, 1410), (5000, 1410), (1, 210)):
        controller.set_frequency(asked)
        gpu.becomes(set_to)
    assert len(warnings(caplog)) == 1
    assert "does not offer" in warnings(caplog)[0]


@pytest.mark.parametrize("device", [-1, 4, True, "0", 1.0])
def test_an_invalid_gpu_is_reported_at_once(zeus: RunningDaemon, device: object) -> None:
    with pytest.raises(ValueError, match="GPU"):
        FrequencyController(device)


# ---------------------------------------------------------------------------------- what goes wrong


def test_clocks_that_may_not_be_set_are_reported_once_and_training_continues(
    zeus: RunningDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(zeus, 2)
    controller = FrequencyController(2)
    for _ in range(20):
        controller.set_frequency(900)
        controller.set_frequency(1200)
        time.sleep(0.02)

    def told() -> list[str]:
        return [one for one in warnings(caplog) if "cannot be set" in one]

    wait_for(told, "the failure to be told")
    assert gpu.mhz() == 1410
    controller.end()
    assert len(told()) <= frequency_controller.MOST_WARNINGS
    assert "default clocks" in told()[0]
    gpu.close()


def test_a_gpu_of_another_process_is_waited_for(
    zeus: RunningDaemon, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    holder = script(
        "import sys; from zeus_ipc import Client\n"
        "client = Client(sys.argv[1]); client.set_gpu_clocks(sys.argv[2], 600, 600)\n"
        "print('held', flush=True); sys.stdin.read()",
        zeus.socket,
        gpu.uuid,
    )
    holder.stdout.readline()
    controller = FrequencyController(0)
    assert not controller.working
    controller.set_frequency(900)
    assert gpu.mhz() == 600
    holder.stdin.close()
    assert holder.wait(TIMEOUT_S) == 0
    wait_for(lambda: controller.working, "the lease to be taken")
    controller.set_frequency(900)
    gpu.becomes(900)
    wait_for(lambda: len(warnings(caplog)) == 2, "it to be told")
    controller.end()
    assert "set again" in warnings(caplog)[1]


def test_a_lease_that_was_lost_can_be_acquired_again(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    controller = gpu.controller()
    controller.set_frequency(900)
    gpu.becomes(900)
    gpu.client.restore(gpu.uuid, ["gpu_clocks"])
    gpu.is_set_again_by(controller)
    wait_for(lambda: any("set again" in one for one in warnings(caplog)), "it to be told")


def test_an_nvml_error_is_met_by_another_try(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    controller = gpu.controller()
    gpu.devices.inject(0, "set_gpu_clocks", 999, count=1)
    controller.set_frequency(900)
    wait_for(lambda: warnings(caplog), "the failure to be told")
    gpu.is_set_again_by(controller)
    gpu.devices.clear_faults()


def test_a_daemon_that_restarts_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with running_daemon("--simulate", "a100:setter_ms=1", gpus=1) as daemon:
        # A call that waited for the daemon would take an hour.
        with Client(daemon.socket, timeout_s=3600.0) as client, _node.use(client):
            controller = FrequencyController(0)
            assert controller.working
            daemon.kill()
            for n in range(200):
                controller.set_frequency(900 + 15 * (n % 2))
                if n % 50 == 49:
                    controller.reset()
                time.sleep(0.001)
            daemon.start_again()
            daemon.wait_until_serving(1)
            gpu = Gpu(daemon)
            gpu.is_set_again_by(controller)
            gpu.close()
            controller.end()


def test_without_a_daemon_and_gpus_nothing_is_raised(
    monkeypatch: pytest.MonkeyPatch, fast: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", "/nonexistent/zeusd.sock")
    monkeypatch.setattr(_node, "_client", None)
    controller = FrequencyController(0)
    controller.prepare([900])
    controller.set_frequency(900)
    controller.reset()
    assert not controller.working
    assert controller.supported == []
    controller.end()
    assert "no such socket" in warnings(caplog)[0]


HOLD = """
import os, sys, time
from zeus.optimizer.pipeline_frequency.frequency_controller import FrequencyController
controller = FrequencyController(0)
controller.set_frequency(900)
print("set", flush=True)
how = sys.stdin.readline().strip()
if how == "raise":
    raise RuntimeError("training failed")
if how == "fork":
    child = os.fork()
    if child == 0:
        controller.set_frequency(600)
        controller.set_frequency(615)
        controller.reset()
        controller.end()
        sys.exit(0)  # with all exit handlers
    os.waitpid(child, 0)
    print("forked", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def training(daemon: RunningDaemon) -> Iterator[subprocess.Popen[str]]:
    """A process of an ordinary user that has asked for 900 MHz."""
    env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
    with script(HOLD, env=env, stderr=subprocess.DEVNULL, **as_nobody()) as process:
        try:
            assert process.stdout.readline() == "set\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("how", "code"), [("fork", 0), ("raise", 1), ("kill", -9)])
def test_clocks_are_restored_however_the_process_ends_but_not_by_its_children(
    zeus: RunningDaemon, gpu: Gpu, how: str, code: int
) -> None:
    with training(zeus) as process:
        gpu.becomes(900)
        if how == "kill":
            process.kill()
        else:
            print(how, file=process.stdin, flush=True)
        if how == "fork":
            assert process.stdout.readline() == "forked\n"
            assert gpu.mhz() == 900
            assert gpu.leases() == ["gpu_clocks"]
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == code
        gpu.becomes(1410)
        wait_for(lambda: gpu.leases() == [], "the lease to end")


def test_a_user_whom_the_site_does_not_let_trains_at_default_clocks() -> None:
    with public_directory() as directory:
        rule = '[[allow]]\nusers = ["*"]\ncontrols = ["power_limit"]\n'
        options = ("--simulate", "a100:setter_ms=1", "--socket-mode", "666")
        options += tuple(configuration(directory, rule))
        with running_daemon(*options, gpus=1, directory=directory) as daemon:
            gpu = Gpu(daemon)
            with training(daemon):
                assert os.getuid() or gpu.mhz() == 1410
            gpu.close()


# ------------------------------------------------------------------------------------ without zeusd


def test_in_process_clocks_are_set_and_restored(
    virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = virtual_node("a100:setter_ms=0")
    work = node.nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")
    controller = FrequencyController(0)
    controller.prepare([900])
    controller.set_frequency(900)
    work.launch(1e6, "forward")
    wait_for(lambda: node.nvml.gpu_clock_mhz(0) == 900, "the clock to be set")
    controller.end()
    wait_for(lambda: node.nvml.gpu_clock_mhz(0) == 1410, "the clock to go back")
    assert node.client.node().gpus  # the engine is others' too
