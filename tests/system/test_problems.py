"""What keeps zeusd from working has its cause in doctor, status and metrics, and ends by itself."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import ALWAYS, NvmlDouble
from tests.fake_nvml.fixtures import MakeDouble
from tests.preloaded import preloaded
from tests.support import CLIENTS, RunningDaemon, configuration, running_daemon, wait_for
from zeus_ipc import Client
from zeus_ipc.errors import JournalFailed, LedgerFailed

nvml_double = fixtures.nvml_double


def quick(folder: Path, double: NvmlDouble) -> tuple[str, ...]:
    """Options of a zeusd that looks often for a driver that is not there."""
    return configuration(folder, f'[nvml]\nlibrary = "{double.library}"\nretry_s = 0.2\n')


def says(daemon: RunningDaemon, module: str, *arguments: str) -> str:
    """What a command prints."""
    return preloaded(*CLIENTS).run("-m", module, *arguments, "--socket", daemon.socket).stdout


def healthy(client: Client, gpus: int) -> bool:
    node = client.node()
    return (len(node.gpus), node.problems) == (gpus, [])


def told(daemon: RunningDaemon, part: str) -> dict[str, Any]:
    """A problem as status has it; doctor and the exporter say the same."""
    status = json.loads(says(daemon, "zeusctl", "status", "--json"))
    (found,) = [one for one in status["node"]["problems"] if one["part"] == part]
    checks = json.loads(says(daemon, "zeusctl", "doctor", "--json"))["checks"]
    (check,) = [one for one in checks if found["cause"] in one["found"]]
    assert (check["state"], check["remedy"]) == ("fault", f"`{found['command']}`")
    text = says(daemon, "zeusctl.exporter", "--once")
    (metric,) = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "zeusd_problem_seconds" and sample.labels["part"] == part
    ]
    for name in ("part", "code", "cause", "command"):
        assert metric.labels[name] == found[name]
    assert metric.value >= found["since_s"]
    result: dict[str, Any] = found
    return result


def test_why_the_driver_cannot_be_opened(nvml_double: MakeDouble, tmp_path: Path) -> None:
    """An unattended upgrade has replaced the library of a loaded driver."""
    double = nvml_double([{}, {}], privilege=ALWAYS)
    double.node.init_code = 18
    with running_daemon(*quick(tmp_path, double), gpus=0, env=double.env) as daemon:
        found = told(daemon, "driver")
        assert (found["code"], found["command"]) == ("18", "sudo reboot")
        assert "the driver and libnvidia-ml versions differ (NVML 18)" in found["cause"]
        double.node.init_code = 0
        with daemon.client() as client:
            wait_for(lambda: healthy(client, 2), "the GPUs")


def test_a_session_of_the_driver_that_died_is_opened_again(nvml_double: MakeDouble) -> None:
    """As quiesce and resume would do it, but leases stay: their values are in force."""
    double = nvml_double([{}, {}], privilege=ALWAYS)
    arguments = ("--nvml-library", str(double.library))
    with (
        running_daemon(*arguments, gpus=2, env=double.env) as daemon,
        daemon.client() as client,
    ):
        gpu = client.node().gpus[0].uuid
        client.set_power_limit(gpu, 150_000)
        for count, code in enumerate((1, 9, 999), 1):
            double.node.session_code = code
            (died, *_) = daemon.wait_for_records("driver_session_died", count)[count - 1 :]
            assert (died["device_code"], died["level"]) == (code, "error")
            daemon.wait_for_records("driver_session_opened", count)
            assert client.state(gpu)[gpu].power_limit_mw == 150_000
            wait_for(lambda: healthy(client, 2), "the driver")
        client.set_power_limit(gpu, 160_000)  # the lease is held
        (lease,) = client.leases()
        assert lease.value == [160_000]
    assert double.limit_mw(0) == 250_000


def test_a_driver_that_does_not_come_back_stays_a_problem(
    nvml_double: MakeDouble, tmp_path: Path
) -> None:
    """zeusd has closed it, so it can be loaded again."""
    double = nvml_double([{}], privilege=ALWAYS)
    with (
        running_daemon(*quick(tmp_path, double), gpus=1, env=double.env) as daemon,
        daemon.client() as client,
    ):
        double.node.init_code = 9
        double.node.session_code = 9
        daemon.wait_for_records("no_driver")
        found = told(daemon, "driver")
        assert (found["code"], found["command"]) == ("9", "sudo modprobe nvidia")
        double.node.init_code = 0
        wait_for(lambda: healthy(client, 1), "the driver")


LOST = "the GPU has fallen off the bus (NVML 15)"


def test_why_a_gpu_is_not_sampled(nvml_double: MakeDouble) -> None:
    """It is lost, or a call to its driver does not return."""
    double = nvml_double([{}, {}], privilege=ALWAYS)
    arguments = ("--nvml-library", str(double.library))
    with (
        running_daemon(*arguments, gpus=2, env=double.env) as daemon,
        daemon.client() as client,
    ):
        double.inject(1, "*", 15)
        wait_for(lambda: client.node().problems, "the lack of samples")
        found = told(daemon, "sampling")
        assert (found["source"], found["code"]) == (double.uuid(1), "15")
        assert found["cause"] == f"no new samples of GPU 1: {LOST}"
        assert 2 <= found["since_s"] < 60
        assert f"GPU 1: it does not answer any request: {LOST}" in says(daemon, "zeusctl", "status")
        double.clear_faults()
        wait_for(lambda: not client.node().problems, "the samples")
        double.inject(1, "*", delay_ms=600_000)
        wait_for(
            lambda: (
                [
                    one.cause.endswith("a call to the driver does not return")
                    for one in client.node().problems
                ]
                == [True]
            ),
            "the lack of samples, and its cause",
        )
        double.clear_faults()
        wait_for(lambda: not client.node().problems, "the samples")


def test_a_gpu_that_cannot_be_used_is_a_problem_until_it_can(nvml_double: MakeDouble) -> None:
    """At the start, and where it is missing after `resume`."""
    double = nvml_double([{}, {}], privilege=ALWAYS)
    double.inject(1, "nvmlDeviceGetHandleByIndex_v2", 15)
    arguments = ("--nvml-library", str(double.library))
    with (
        running_daemon(*arguments, gpus=1, env=double.env) as daemon,
        daemon.client() as client,
    ):
        assert told(daemon, "gpu")["cause"].endswith(LOST)
        double.clear_faults()
        wait_for(lambda: len(client.node().gpus) == 2, "the other GPU")
        assert client.node().problems == []
        client.quiesce()
        double.node.count = 1
        client.resume()
        assert told(daemon, "gpu")["cause"] == "GPU 1 was not found again"
        client.quiesce()
        double.node.count = 2
        client.resume()
        assert client.node().problems == []


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    """At the start, as where its file system is not mounted yet; and until it can be."""
    disk = tmp_path / "disk"
    disk.symlink_to(tmp_path / "mounted")
    options = configuration(tmp_path, f'[accounting]\ndirectory = "{disk}/ledger"\n')
    simulated = ("--simulate", "1xv100-pcie", *options, "--state-dir", f"{disk}/state")
    with (
        running_daemon(*simulated, gpus=1) as daemon,
        daemon.client() as client,
    ):
        gpu = client.node().gpus[0].uuid
        wait_for(lambda: len(client.node().problems) == 2, "both to be noticed")
        with pytest.raises(JournalFailed):
            client.set_power_limit(gpu, 150_000)
        with pytest.raises(LedgerFailed):
            client.allocate(gpu, "7")
        for part, folder in (("journal", disk / "state"), ("ledger", disk / "ledger")):
            found = told(daemon, part)
            assert str(folder) in found["cause"]
            assert (found["code"], found["command"]) == ("EEXIST", f"findmnt -T {folder}")
        assert len(daemon.wait_for_records("journal_failed")) == 1
        (tmp_path / "mounted").mkdir()
        wait_for(lambda: healthy(client, 1), "both to be used")
        client.set_power_limit(gpu, 150_000)
        client.allocate(gpu, "7")


def test_a_gpu_that_is_gone_before_it_was_restored(
    nvml_double: MakeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen without looking for it, across restarts, until an administrator gives it up by name."""
    double = nvml_double([{}, {}, {}], privilege=ALWAYS)
    arguments = ("--nvml-library", str(double.library))
    with running_daemon(*arguments, gpus=3, env=double.env) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = ("-m", "zeusctl", "set", "2", "-p", "150")
        holder = preloaded(*CLIENTS).start(*command, **silent)
        wait_for(lambda: double.limit_mw(2) == 150_000, "the setting")
        daemon.kill()
        double.node.count = 2
        holder.kill()
        holder.wait()
        for _ in range(2):
            daemon.start_again()
            daemon.wait_until_serving(2)
            text = says(daemon, "zeusctl.exporter", "--once")
            uuid = double.uuid(2)
            labels = f'{{control="power_limit",gpu="",uuid="{uuid}"}}'
            assert f"zeusd_restore_pending{labels} 1.0" in text
            (age_s,) = re.findall(rf"zeusd_restore_pending_seconds{labels} (\S+)", text)
            assert float(age_s) > 0
            forget = f"`sudo zeusctl reset {uuid} --forget`"
            assert forget in says(daemon, "zeusctl", "status")
            checks = json.loads(says(daemon, "zeusctl", "doctor", "--json"))["checks"]
            (check,) = [one for one in checks if one["name"] == "restores"]
            assert (check["state"], forget in check["remedy"]) == ("fault", True)
            daemon.kill()
        daemon.start_again()
        daemon.wait_until_serving(2)
        assert says(daemon, "zeusctl", "reset", uuid[:12], "--forget") == ""  # it is not a name
        said = says(daemon, "zeusctl", "reset", uuid, "--forget")
        assert said == f"power_limit of {uuid} will not be restored\n"
        assert "restore_forgotten" in says(daemon, "zeusctl", "audit")
        daemon.kill()
        daemon.start_again()
        daemon.wait_until_serving(2)
        assert says(daemon, "zeusctl", "leases") == "no leases\n"
        assert uuid not in says(daemon, "zeusctl.exporter", "--once")
