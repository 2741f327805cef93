"""zeusd out of the driver's way: over the real wrapper and the C stand-in for libnvidia-ml."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import ALWAYS, NvmlDouble
from tests.fake_nvml.fixtures import MakeDouble
from tests.support import (
    TIMEOUT_S,
    RunningDaemon,
    ending,
    public_directory,
    running_daemon,
    wait_for,
)
from zeus_common.simulation import SimulatedNode
from zeus_ipc.errors import LeaseExpired, NodeQuiesced, PermissionRefused
from zeusd.identity import boot_id
from zeusd.runtime import driver

nvml_double = fixtures.nvml_double


@contextlib.contextmanager
def node(double: NvmlDouble, gpus: int) -> contextlib.AbstractContextManager[RunningDaemon]:
    with running_daemon("--nvml-library", double.library, gpus=gpus, env=double.env) as daemon:
        yield daemon


def device_is_open(daemon: RunningDaemon, double: NvmlDouble) -> bool:
    device = f"{double.state_path}.nvidiactl"
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    found = []
    for fd in folder.iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(fd))
    return device in found


def test_the_driver_is_closed_and_opened_again(nvml_double: MakeDouble) -> None:
    double = nvml_double([{}, {}], privilege=ALWAYS)
    with node(double, 2) as daemon, daemon.client() as client:
        gpus = [gpu.uuid for gpu in client.node().gpus]
        assert device_is_open(daemon, double)
        client.set_power_limit(gpus, 150_000)
        begin_ns = client.state(gpus[0])[gpus[0]].t_ns
        result = client.quiesce()
        assert (result.open, result.pending) == ([], [])
        assert not device_is_open(daemon, double)
        assert [double.limit_mw(gpu) for gpu in range(2)] == [250_000, 250_000]
        with pytest.raises(NodeQuiesced):
            client.state(gpus[0])
        # A reset changes a GPU: it returns as another one.
        double.node.gpus[0].limit_mw = 200_000
        double.node.gpus[0].name = b"Tesla V100-PCIE-32GB"
        calls = len(double.calls())
        info = client.resume()
        assert device_is_open(daemon, double)
        assert info.gpus[0].name == "Tesla V100-PCIE-32GB"
        assert info.gpus[0].power_limit_site_mw == 200_000
        assert len(double.calls()) == calls, "nothing is written that nobody asked for"
        with pytest.raises(LeaseExpired):
            client.set_power_limit(gpus[0], 150_000)
        client.release()
        client.set_power_limit(gpus[0], 150_000)
        end_ns = client.state(gpus[0])[gpus[0]].t_ns
        wait_for(
            lambda: client.windows(gpus[0], [(begin_ns, end_ns, False)])[gpus[0]].energy_uj[0],
            "a window over all of it",
        )


def test_a_gpu_that_is_gone_after_a_reset_is_reported(nvml_double: MakeDouble) -> None:
    double = nvml_double([{}, {}], privilege=ALWAYS)
    with node(double, 2) as daemon, daemon.client() as client:
        gpus = [gpu.uuid for gpu in client.node().gpus]
        client.quiesce()
        double.node.count = 1
        client.resume()
        client.set_power_limit(gpus[0], 150_000)
        with pytest.raises(Exception, match="was not found again"):
            client.set_power_limit(gpus[1], 150_000)


def test_a_restart_leaves_the_driver_closed(nvml_double: MakeDouble) -> None:
    double = nvml_double()
    with node(double, 1) as daemon, daemon.client() as client:
        client.quiesce()
        daemon.kill()
        daemon.start_again()
        daemon.wait_until_serving(0)
        assert not device_is_open(daemon, double)
        assert client.node().quiesced_ns is not None
        daemon.stop()
        daemon.start_again()
        daemon.wait_until_serving(0)
        assert len(client.resume().gpus) == 1
        assert device_is_open(daemon, double)


def test_a_call_that_does_not_return_does_not_keep_the_administrator(
    nvml_double: MakeDouble,
) -> None:
    double = nvml_double()
    with node(double, 1) as daemon, daemon.client(timeout_s=20) as client:
        double.inject(0, "nvmlDeviceGetFieldValues", delay_ms=60_000)
        wait_for(lambda: daemon.records("sampler_stuck"), "the sampler to hang")
        client.quiesce()
        daemon.wait_for_records("driver_stuck")
        assert device_is_open(daemon, double)
        double.clear_faults()
        wait_for(lambda: not device_is_open(daemon, double), "the driver to let go")
        assert client.quiesce().open == []
        client.resume()
        gpu = client.node().gpus[0].uuid
        assert client.state(gpu)[gpu].power_limit_mw == 250_000


def test_device_files_that_are_open_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "DEVICE_FILES", str(tmp_path / "nvidia"))
    for name in ("nvidia0", "nvidiactl", "other"):
        (tmp_path / name).touch()
    with (tmp_path / "nvidiactl").open(), (tmp_path / "other").open():
        with (tmp_path / "nvidia0").open():
            assert driver.open_device_files() == (
                str(tmp_path / "nvidia0"),
                str(tmp_path / "nvidiactl"),
            )
        assert driver.open_device_files() == (str(tmp_path / "nvidiactl"),)


def test_the_audit_log_outlives_a_restart_and_garbage_in_its_place() -> None:
    with running_daemon("--simulate", "1xv100-pcie") as daemon:
        with daemon.client() as client:
            client.set_power_limit(client.node().gpus[0].uuid, 150_000)
        with daemon.client() as client:
            before = client.audit().records
        daemon.stop()
        daemon.start_again()
        daemon.wait_until_serving(1)
        with daemon.client() as client:
            assert client.audit().records[: len(before)] == before
        daemon.stop()


@pytest.mark.parametrize("kind", ["cut off", "nested", "fifo", "link", "other values"])
def test_what_is_in_place_of_the_audit_log_stops_no_start(kind: str) -> None:
    with running_daemon("--simulate", "1xv100-pcie") as daemon:
        daemon.stop()
        path = daemon.state_dir / "audit.json"
        path.unlink(missing_ok=True)
        texts = {"cut off": '{"boot": 1, "records"', "nested": "[" * 3_000_000}
        texts["other values"] = json.dumps({"boot": boot_id(), "records": [{"number": []}]})
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to("/dev/zero")
        else:
            path.write_text(texts[kind])
            path.chmod(0o600)
        daemon.start_again()
        daemon.wait_until_serving(1)
        daemon.wait_for_records("audit_unreadable")
        with daemon.client() as client:
            assert client.audit().records == [], "a restart alone is no record"


def test_all_of_a_long_audit_log_reaches_its_reader() -> None:
    """Records with the longest texts there are: a message that is too long would never arrive."""
    with running_daemon("--simulate", "1xv100-pcie:setter_ms=0") as daemon:
        with daemon.client() as client:
            gpu = client.node()
            assert gpu.simulated is not None
            simulated = SimulatedNode(gpu.simulated)
            simulated.inject(0, "set_power_limit", 4)
            for number in range(600):
                with contextlib.suppress(PermissionRefused):
                    client.set_power_limit(gpu.gpus[0].uuid, 150_000 + 10 * number)
            page = client.audit(limit=1000)
        assert len(page.records) >= 600
        numbers = [record.number for record in page.records]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.needs("root", "util-linux")
def test_a_zeusd_with_no_capability_but_sys_admin_serves_and_ends_in_order() -> None:
    """As in a container, or in its unit."""
    with public_directory() as directory:
        command = ["setpriv", "--bounding-set=-all,+sys_admin", "--inh-caps=-all"]
        command += [sys.executable, "-m", "zeusd", "serve", "--simulate", "1xv100-pcie"]
        command += ["--socket", str(directory / "z.sock"), "--state-dir", str(directory / "state")]
        command += ["--log-format", "json"]
        with ending(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process:
            lines = []
            while "serving" not in (line := process.stderr.readline()):
                assert line
                lines.append(line)
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(TIMEOUT_S) == 0
        assert "Traceback" not in rest
        assert "stopped" in rest
