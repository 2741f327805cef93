"""zeusd on the C stand-in for libamd_smi: the writes of a job and of a crash to the driver.

The tests share one zeusd, which the last one kills.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_amdsmi.double import (
    ALWAYS,
    AUTO,
    BY_EUID,
    GRAPHICS,
    MANUAL,
    MAX,
    MEMORY,
    MIN,
    AmdSmiDouble,
)
from tests.support import (
    ALL_MAY,
    RunningDaemon,
    as_nobody,
    ending,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from tests.zeusd.killed import holding, installed, run_helper
from zeus_ipc.errors import ZeusIpcError

HOLDER = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1])
gpus = [gpu.uuid for gpu in client.node().gpus]
client.set_power_limit(gpus, 400_000)
client.set_memory_clocks(gpus[0], 1000, 1000)
client.set_gpu_clocks(gpus[0], 900, 900)
print("holding", flush=True)
sys.stdin.readline()
"""

SET = [
    ("set_power_cap", (400_000_000, 0, 0)),
    ("set_power_cap", (400_000_000, 0, 0)),
    ("set_gpu_clk_limit", (MEMORY, MAX, 1000)),
    ("set_gpu_clk_limit", (GRAPHICS, MAX, 900)),
    ("set_gpu_clk_limit", (GRAPHICS, MIN, 899)),
]

BACK = [
    ("set_gpu_perf_level", (AUTO, 0, 0)),
    ("set_gpu_clk_limit", (MEMORY, MAX, 1000)),  # whose own restore is next
    ("set_gpu_perf_level", (AUTO, 0, 0)),
    ("set_power_cap", (750_000_000, 0, 0)),
    ("set_power_cap", (750_000_000, 0, 0)),
]


JOB = """
import json, sys, time
sys.path.insert(0, sys.argv[2])
from train import train
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import Done, GlobalPowerLimitOptimizer, MaxSlowdownConstraint
from zeus_ipc import Client

SECONDS = {750: 0.02, 600: 0.0205, 450: 0.2, 300: 0.4}
client = Client(sys.argv[1])
monitor = ZeusMonitor(gpu_indices=[0])
gpu = monitor.gpus[0]

class Work:
    name = "steps that take longer under a lower cap"

    def step(self):
        time.sleep(SECONDS[gpu.get_power_management_limit() // 1000])

    def finish(self):
        pass

def steps():
    while not isinstance(optimizer.state, Done):
        yield 0
    times = {one.power_limit: one.time for one in optimizer.measurements}
    state = optimizer.state
    print(json.dumps([state.optimal_power_limit, state.chosen, times]), flush=True)
    while True:
        yield 0

optimizer = GlobalPowerLimitOptimizer(
    monitor, MaxSlowdownConstraint(2.9), warmup_steps=1, profile_steps=6, pl_step=150,
    search="exhaustive",
)
train(optimizer, Work(), steps())
"""

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[RunningDaemon, AmdSmiDouble]]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        privilege = BY_EUID if os.geteuid() == 0 else ALWAYS
        loaded = {"load_w": 700, "power_w": 700, "cap_min_uw": 300_000_000, "presets": 0xC}
        double = AmdSmiDouble(directory, [loaded, {}], privilege=privilege)
        config = directory / "zeusd.toml"
        amd = f'[amd]\nlibrary = "{double.library}"\nsysfs = "{double.sysfs}"\n'
        config.write_text(ALL_MAY + amd)
        daemon = stack.enter_context(
            running_daemon(
                *("--config", str(config), "--socket-mode", "0666"),
                gpus=2,
                env=double.env,
                directory=directory,
            )
        )
        yield daemon, double


def state(double: AmdSmiDouble) -> list[tuple[int, int, int, int]]:
    gpus = [double.node.gpus[index] for index in range(2)]
    return [(gpu.cap_uw, gpu.sclk_low, gpu.sclk_high, gpu.mclk_high) for gpu in gpus]


UNTOUCHED = [(750_000_000, 132, 2100, 1300)] * 2


def test_a_killed_job_causes_exactly_the_writes_that_restore_its_gpus(
    node: tuple[RunningDaemon, AmdSmiDouble],
) -> None:
    daemon, double = node
    before = len(double.written())
    with holding(HOLDER, daemon):
        assert double.written()[before:] == SET
    wait_for(lambda: state(double) == UNTOUCHED, "everything to be restored")
    daemon.wait_for_records("restore", 4)
    assert sorted(double.written()[before + len(SET) :]) == sorted(BACK)


PROFILE = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1])
gpu = client.node().gpus[0].uuid
client.set(gpu, "power_profile", (243,))
print("holding", flush=True)
sys.stdin.readline()
"""


def test_a_killed_jobs_power_profile_is_restored_and_anothers_is_not_replaced(
    node: tuple[RunningDaemon, AmdSmiDouble],
) -> None:
    daemon, double = node
    before = len(double.written())
    gpu = double.node.gpus[0]
    with daemon.client() as client:
        info, other = client.node().gpus
        names = {one.name: one.conflicts for one in info.power_profiles}
        assert names == {"amd-power-saving": [243], "amd-compute": [242]}
        assert other.power_profiles == []
        with holding(PROFILE, daemon):
            assert gpu.preset == 8
            found = client.state(info.uuid)[info.uuid]
            assert (found.controls["power_profile"], found.enforced_power_profiles) == (
                [243],
                [243],
            )
        wait_for(lambda: (gpu.preset, gpu.level) == (0, AUTO), "the default")
        daemon.wait_for_records("restore", 1)
        gpu.preset, gpu.level = 4, MANUAL  # someone else, by amd-smi
        with pytest.raises(ZeusIpcError, match="an AMD GPU has one profile at a time"):
            client.set(info.uuid, "power_profile", (243,))
        assert (gpu.preset, client.leases()) == (4, [])
        gpu.preset, gpu.level = 0, AUTO
    presets = [one for one in double.written()[before:] if one[0] == "set_gpu_power_profile"]
    assert [arguments[0] for _, arguments in presets] == [8, 64]


def test_the_quickstarts_job_of_an_ordinary_user_writes_each_cap_once(
    node: tuple[RunningDaemon, AmdSmiDouble],
) -> None:
    daemon, double = node
    before = len(double.written())
    env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(public_directory())  # the checkout may be root's own
        shutil.copytree(QUICKSTART, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
        folder.chmod(0o755)
        training = script(JOB, daemon.socket, str(folder), env=env, **as_nobody())
        job = stack.enter_context(ending(training))
        chosen_mw, chosen, times = json.loads(job.stdout.readline())
        power_w = double.node.gpus[0].power_w
    seconds = {int(cap_w): time_s for cap_w, time_s in times.items()}
    # 600 W, unless the machine delayed some steps.
    chosen_w = min(cap_w for cap_w, time_s in seconds.items() if time_s <= 2.9 * seconds[750])
    assert (chosen_mw, chosen, power_w) == (1000 * chosen_w, True, min(700, chosen_w))
    wait_for(lambda: state(double) == UNTOUCHED, "the cap to be restored")
    daemon.wait_for_records("restore", 1)
    caps_w = [600, 450, 300, chosen_w, 750]  # it began with 750 W, which is not written again
    caps_w = [cap_w for cap_w, _ in itertools.groupby(caps_w)]
    assert double.written()[before:] == [
        ("set_power_cap", (cap_w * 1_000_000, 0, 0)) for cap_w in caps_w
    ]
    callers = {(call.pid, call.uid) for call in double.calls()}
    assert callers == {(daemon.process.pid, os.geteuid())}


def test_the_helper_restores_what_a_killed_zeusd_left(
    node: tuple[RunningDaemon, AmdSmiDouble], tmp_path: Path
) -> None:
    daemon, double = node
    before = len(double.written())
    with holding(HOLDER, daemon):
        daemon.kill()
    command = ("-I", "-S", str(installed(tmp_path)))
    done = run_helper(*command, state_dir=daemon.state_dir, env=double.env)
    assert done.returncode == 0, done.stderr
    assert "restored to 750 W" in done.stderr
    assert state(double) == UNTOUCHED
    assert sorted(double.written()[before + len(SET) :]) == sorted(
        [
            ("set_gpu_perf_level", (AUTO, 0, 0)),  # the memory clock's lease is the older one
            ("set_gpu_clk_limit", (GRAPHICS, MAX, 900)),
            ("set_gpu_clk_limit", (GRAPHICS, MIN, 899)),
            ("set_gpu_perf_level", (AUTO, 0, 0)),
            ("set_power_cap", (750_000_000, 0, 0)),
            ("set_power_cap", (750_000_000, 0, 0)),
        ]
    )
