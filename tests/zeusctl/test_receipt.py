"""`zeusctl receipt` and `zeus.monitor.receipt` on a node where something happened."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import RunningDaemon, configuration, ending, running_daemon, wait_for
from tests.zeusctl.conftest import Ctl, as_nobody_says
from zeus.exceptions import ZeusArgumentError
from zeus.monitor import Measurement, ZeusMonitor, receipt
from zeus_common import evidence
from zeus_common.evidence import make_receipt
from zeus_common.receipts import Receipt, Subject
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeus_ipc.errors import UnknownGpu
from zeusctl.exits import Exit
from zeusctl.receipts import page

WORKLOAD = "nsdi23/v100/imagenet/resnet50/adadelta/32"
CAP_MW = 150_000

OTHER = f"""
import sys, time
from zeus_common.simulation import SimulatedWork
with SimulatedWork(sys.argv[1], [sys.argv[2]], {WORKLOAD!r}) as work:
    while True:
        work.run()
        print(flush=True)
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A node whose ledger knows the processes of GPUs."""
    folder = tmp_path_factory.mktemp("receipts")
    text = f'[accounting]\ndirectory = "{folder}"\nprocesses = true\n'
    text += '[[allow]]\nusers = ["*"]\n[daemon]\nsocket_mode = "0666"\n'
    node = ("--simulate", "2xv100-pcie", *configuration(folder, text))
    with running_daemon(*node, gpus=2) as running:
        yield running


class Bench:
    """This process computes on GPU 0 until the end of the test."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.client = daemon.client()
        gpu = self.client.node().gpus[0]
        self.path, self.gpu = self.client.node().simulated or "", gpu.uuid
        self._stop = threading.Event()
        self._works = threading.Thread(target=self._run)
        self._works.start()

    def _run(self) -> None:
        with SimulatedWork(self.path, [self.gpu], WORKLOAD) as work:
            while not self._stop.is_set():
                work.run()

    def receipt(self, since_ns: int, **more: Any) -> Receipt:
        return make_receipt(self.client, since_ns, time.monotonic_ns(), [self.gpu], **more)

    def settles(self, condition: Callable[[Receipt], bool], what: str) -> Receipt:
        """The first receipt of a moment that is as it should be: what is listed each second comes
        late.
        """

        def look() -> Receipt | None:
            since_ns = time.monotonic_ns()
            time.sleep(0.1)
            found = self.receipt(since_ns)
            return found if condition(found) else None

        found = wait_for(look, what)
        assert isinstance(found, Receipt)
        return found

    def stop(self) -> None:
        """Ends the work."""
        self._stop.set()
        self._works.join()

    def close(self) -> None:
        self.stop()
        self.client.restore()
        self.client.close()


@pytest.fixture
def bench(daemon: RunningDaemon, node: SimulatedNode) -> Iterator[Bench]:
    found = Bench(daemon)
    try:
        found.settles(lambda one: one.valid and bool(one.gpus[0].occupants), "a valid receipt")
        yield found
    finally:
        found.close()


def test_an_undisturbed_interval_is_valid(bench: Bench) -> None:
    found = bench.settles(lambda one: one.valid, "a valid receipt")
    assert found.reasons == []
    (gpu,) = found.gpus
    (user,) = gpu.occupants
    assert user.own
    assert f"process {os.getpid()} of " in user.who
    now_ns, now = time.monotonic_ns(), datetime.now(timezone.utc)
    begin_ns, end_ns = (
        now_ns - round((now - one).total_seconds() * 1e9) for one in (found.since, found.until)
    )
    energies = bench.client.windows(bench.gpu, [(begin_ns, end_ns, 0)])[bench.gpu]
    assert gpu.energy_j == pytest.approx((energies.energy_uj[0] or 0) / 1e6, rel=0.05)
    assert gpu.power_limits[0].power_limit_w == gpu.power_limit_default_w == 250
    assert (gpu.method, gpu.gaps, found.restarts, found.simulated) == ("counter", [], [], True)
    assert gpu.vbios
    assert found.driver


def test_a_forgotten_cap_is_named(bench: Bench, node: SimulatedNode) -> None:
    node.set_outside(0, CAP_MW)
    wait_for(
        lambda: any(one.event == "outside_change" for one in bench.client.audit().records),
        "zeusd to notice the cap",
    )
    found = bench.settles(
        lambda one: one.gpus[0].power_limits[0].power_limit_w == 150, "the cap in the history"
    )
    cap = "its power limit was 150 W, below its usual 250 W: power limit changed outside"
    assert any(cap in reason for reason in found.reasons), found.reasons


def test_a_second_process_is_named(bench: Bench) -> None:
    since_ns = time.monotonic_ns()
    bench.stop()
    arguments = [sys.executable, "-c", OTHER, bench.path, bench.gpu]
    with ending(subprocess.Popen(arguments, stdout=subprocess.PIPE)) as other:
        assert other.stdout is not None
        other.stdout.readline()
        # Processes are listed each second: then, this one's work has ended before.
        bench.settles(
            lambda one: (
                [f"process {other.pid} of " in each.who for each in one.gpus[0].occupants]
                == [one.valid]
                == [True]
            ),
            "the other process alone",
        )
        for pid, second in ((os.getpid(), other.pid), (other.pid, os.getpid())):
            found = bench.receipt(since_ns, subject=Subject("process", str(pid)))
            too = [reason for reason in found.reasons if "used it, too" in reason]
            assert [f"process {second} of " in reason for reason in too] == [True]
            own = [one.who for one in found.gpus[0].occupants if one.own]
            assert [f"process {pid} of " in who for who in own] == [True]


def test_a_gap_in_the_sensors_is_named(bench: Bench, node: SimulatedNode) -> None:
    since_ns = time.monotonic_ns()
    before = len(bench.client.timeline(bench.gpu, "gap"))
    node.inject(0, "sensors", code=999)
    wait_for(lambda: time.monotonic_ns() > since_ns + 2_500_000_000, "some time")
    node.clear_faults()
    wait_for(lambda: len(bench.client.timeline(bench.gpu, "gap")) > before, "the gap's end")
    found = bench.receipt(since_ns)
    assert any("no reading of its sensors for " in one for one in found.reasons), found.reasons
    longest = max(gap.until - gap.since for gap in found.gpus[0].gaps)
    assert timedelta(seconds=2) < longest < timedelta(minutes=1)


def test_a_restart_of_zeusd_is_named(tmp_path: Path) -> None:
    with running_daemon("--simulate", "v100-pcie", *configuration(tmp_path), gpus=1) as daemon:
        since_ns = time.monotonic_ns()
        daemon.stop()
        daemon.start_again()
        daemon.wait_until_serving(gpus=1)
        with daemon.client() as client:
            gpu = client.node().gpus[0].uuid
            wait_for(lambda: client.timeline(gpu), "a history")
            found = make_receipt(client, since_ns, time.monotonic_ns())
            assert len(found.restarts) == 1
            assert any(one.startswith("zeusd was restarted at ") for one in found.reasons)
            assert any(one.startswith("nobody knows who used the GPUs: ") for one in found.reasons)
            records = client.audit().records
        assert [one.event for one in records].count("restarted") == 1


def test_the_ledger_is_not_awaited_for_a_gpu_without_sensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("it waits")

    times = SimpleNamespace(
        sleep=sleep, monotonic=time.monotonic, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns
    )
    text = f'[accounting]\ndirectory = "{tmp_path}/ledger"\n'
    spec = "a100-sxm-80,a100-sxm-80:lacks=power+counter"
    with running_daemon("--simulate", spec, *configuration(tmp_path, text), gpus=2) as daemon:
        with daemon.client() as client:
            seen, blind = (gpu.uuid for gpu in client.node().gpus)
            wait_for(lambda: client.usage([0, 900], "total", gpus=[seen]).settled_ms, "a ledger")
            monkeypatch.setattr(evidence, "time", times)
            now_ns = time.monotonic_ns()
            found = make_receipt(client, now_ns - 10**8, now_ns, [blind])
    (reason,) = found.reasons
    assert "GPU 1: its energy is not known: " in reason
    assert found.gpus[0].limited_s == {}


def test_a_jobs_receipt_is_of_its_time(ctl: Ctl, bench: Bench) -> None:
    """Others had the GPU before and after it, and nobody in between."""
    for job in ("10", "11", "12"):
        bench.client.allocate(bench.gpu, job)
        since_ns = time.monotonic_ns()
        wait_for(lambda: time.monotonic_ns() > since_ns + 300_000_000, "some time")
        bench.client.deallocate(job)
    said = ctl("receipt", "--job", "11", "--json")
    found = Receipt.model_validate_json(said.out)
    assert 0.25 < found.time_s < 30
    assert [one.who for one in found.gpus[0].occupants] == ["job 11"]
    assert not any("used it, too" in one or "nobody knows" in one for one in found.reasons)
    assert found.subject == "job 11"


@pytest.mark.needs("root")
def test_others_see_what_the_policy_lets_them(daemon: RunningDaemon, bench: Bench) -> None:
    bench.client.set_power_limit(bench.gpu, CAP_MW)
    bench.settles(lambda one: one.gpus[0].power_limits[0].power_limit_w == 150, "the limit")
    lines = ["receipt", "0", "--since", "100ms", "--json"]
    (said,) = as_nobody_says(daemon, lines)
    found = json.loads(said.out)
    assert said.code == Exit.FAILED
    text = " ".join(found["reasons"])
    assert "other users, whom zeusd does not name to you, used it, too" in text
    assert str(os.getpid()) not in said.out
    assert "pytest" not in said.out
    assert "power limit set to 150 W at " in text


def test_the_command_prints_writes_and_compares(
    ctl: Ctl, bench: Bench, node: SimulatedNode, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    lines = ("receipt", "0", "--since", "100ms", "-o", str(first))
    bench.settles(lambda one: one.gpus[0].power_limits[0].power_limit_w == 250, "no earlier cap")
    said = wait_for(lambda: (one := ctl(*lines)).code == Exit.OK and one, "a valid receipt")
    assert said.out.splitlines()[-1] == "valid"
    whole = Receipt.model_validate_json(first.read_text())
    assert whole.valid
    for mhz, text in (([135, 135, 135], "135 MHz)"), ([135, 900, 1380], "135 to 1380 MHz)")):
        whole.gpus[0].gpu_clock_mhz[:] = mhz
        assert [*page(whole)][3].endswith(f", limit 250 W, {text}")
    said = ctl("receipt", "0", "--since", "100ms", "--format", "inferencex")
    flag = json.loads(said.out)
    assert (flag["power_valid"], flag["power_metric_schema_version"]) == (said.code == Exit.OK, 2)
    bench.client.set_ceiling(bench.gpu, "fleet", 150_000)
    bench.settles(lambda one: one.gpus[0].power_limits[0].power_limit_w == 150, "the ceiling")
    said = ctl("receipt", "0", "--since", "100ms", "-o", str(second))
    assert said.code == Exit.FAILED
    said = ctl("receipt", "--compare", str(first), str(second))
    assert said.code == Exit.FAILED
    assert "ceiling fleet set, power limit at most 150 W" in said.out
    good = json.loads(first.read_text())
    hour = {"energy_j": 500.0 * 3600, "time_s": 3600.0}
    for changed, text in (({}, ""), ({"time_s": 9.998}, ""), (hour, ", 10 s and 3600 s: compare ")):
        first.write_text(json.dumps(good | {"energy_j": 4000.0, "time_s": 10.0}))
        second.write_text(json.dumps(good | {"energy_j": 4000.0, "time_s": 10.0} | changed))
        said = ctl("receipt", "--compare", str(first), str(second))
        assert said.code == Exit.OK
        head, energies, powers = said.out.splitlines()
        assert text in head if text else head == "comparable"
        report = json.loads(ctl("--json", "receipt", "--compare", str(first), str(second)).out)
        assert (report["comparable"], report["reasons"]) == (True, [])
        assert head.removeprefix("comparable").removeprefix(", but ") == report["note"]
    assert energies == "energy: 4000.0 J in the first, 1800000.0 J in the second (+44900.0 %)"
    assert powers == "mean power: 400.0 W in the first, 500.0 W in the second (+25.0 %)"
    for changed in (
        *({"energy_j": energy_j} for energy_j in (None, math.nan, math.inf, -1.0)),
        *({"valid": False}, {"gpus": 7}, {"time_s": 0.0}, {"time_s": math.nan}),
    ):
        second.write_text(json.dumps(good | changed))
        said = ctl("receipt", "--compare", str(first), str(second))
        assert (said.code, said.out) == (Exit.FAILED, "")
        assert f"{second} is not a receipt, or not a whole one" in said.err
    second.write_text(json.dumps(good | {"driver": "5\x1b[2K\ncomparable: yes"}))
    said = ctl("receipt", "--compare", str(first), str(second))
    assert said.out.endswith(" in the first, 5?[2K?comparable: yes in the second\n")
    second.write_text(json.dumps(good | {"energy_j": 0.0}))
    said = ctl("receipt", "--compare", str(second), str(second))
    assert said.out.splitlines()[1] == "energy: 0.0 J in the first, 0.0 J in the second"
    bench.client.set_ceiling(bench.gpu, "fleet", None)


def test_a_gpu_that_is_gone_is_not_left_out(bench: Bench) -> None:
    since_ns = time.monotonic_ns()
    with pytest.raises(UnknownGpu, match="zeusd has no GPU GPU-gone now"):
        make_receipt(bench.client, since_ns, time.monotonic_ns(), [bench.gpu, "GPU-gone"])


def test_an_interval_before_the_history_is_not_valid(ctl: Ctl) -> None:
    long_ago = datetime.now(timezone.utc) - timedelta(days=400)
    said = ctl("receipt", "0", "--since", long_ago.isoformat(), "--json")
    found = json.loads(said.out)
    assert (said.code, found["valid"], found["energy_j"]) == (Exit.FAILED, False, None)
    assert any("its history begins at " in one for one in found["reasons"])


def test_a_measurement_has_a_receipt(
    daemon: RunningDaemon, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    monitor = ZeusMonitor([0], cpu_indices=[])

    def measured() -> Measurement | None:
        monitor.begin_window("all")
        time.sleep(0.2)
        found = monitor.end_window("all")
        return found if receipt(found).valid else None

    window = wait_for(measured, "a valid measurement")
    found = receipt(window)
    assert found.time_s == pytest.approx(window.time)
    assert found.gpus[0].energy_j == pytest.approx(window.gpu_energy[0], rel=0.3)
    nothing: Any = None
    for other in (Measurement(1.0, {0: 1.0}), nothing):
        with pytest.raises(ZeusArgumentError, match="was not made in this process"):
            receipt(other)
