"""One engine at a time changes a GPU, whatever their state directories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import ending, public_directory, running_daemon, wait_for
from zeus_ipc.controls import Control
from zeus_ipc.errors import LeaseHeld
from zeusd import embed
from zeusd.devices.vendors import Options
from zeusd.nodes import real_node
from zeusd.runtime.gpu_locks import GpuLocks

OTHER = """
import sys
from zeusd.runtime.gpu_locks import GpuLocks
assert GpuLocks(sys.argv[1]).take("GPU-1") is None
print("taken", flush=True)
sys.stdin.readline()
"""


def test_a_lock_excludes_engines_of_this_process_and_of_others(tmp_path: Path) -> None:
    directory = str(tmp_path / "gpus")
    first, second = GpuLocks(directory), GpuLocks(directory)
    assert first.take("GPU-0") is first.take("GPU-0") is None
    refusal = second.take("GPU-0")
    assert refusal is not None
    assert f"(pid {os.getpid()})" in refusal.message
    assert second.take("GPU-1") is None, "another GPU"
    first.release("GPU-0")
    assert second.take("GPU-0") is None
    second.close()
    assert second.initial("GPU-0") == {}
    assert first.take("GPU-0", {Control.POWER_LIMIT: (250_000,)}) is None
    assert second.initial("GPU-0") == {Control.POWER_LIMIT: (250_000,)}
    with ending(
        subprocess.Popen(
            [sys.executable, "-c", OTHER, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        refusal = first.take("GPU-1")
        assert refusal is not None
        assert f"(pid {other.pid})" in refusal.message
        other.kill()
        other.wait()
        assert first.take("GPU-1") is None, "the kernel frees it"
    first.close()


def test_a_lock_whose_file_is_removed_is_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with all of /run/zeusd."""
    directory = tmp_path / "gpus"
    first, second = GpuLocks(str(directory)), GpuLocks(str(directory))
    for again in (first.verify, lambda: first.take("GPU-0")):
        assert first.take("GPU-0") is None
        shutil.rmtree(directory)
        again()
        assert (directory / "GPU-0").exists()
        command = [sys.executable, "-c", OTHER.replace("GPU-1", "GPU-0"), str(directory)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "AssertionError" in done.stderr
    shutil.rmtree(directory)
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        (directory / "GPU-1").rename(directory / "GPU-0")
        first.verify()
        first.verify()
        other.kill()
    (record,) = caplog.records
    assert f"changed by another zeusd or training process (pid {other.pid})" in record.message
    assert second.take("GPU-0") is None
    second.close()


def test_where_no_lock_can_be_made_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert GpuLocks(str(tmp_path / "file" / "gpus")).take("GPU-0") is None
    assert GpuLocks(None).take("GPU-0") is None


def test_a_second_zeusd_and_an_embedded_engine_leave_a_changed_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both end normally, and nothing of either stays."""
    with public_directory() as folder:
        (folder / "one").mkdir()
        (folder / "two").mkdir()
        double = NvmlDouble(folder, [{}], privilege=0 if os.getuid() == 0 else 1)
        options = ("--nvml-library", double.library)
        uuid = double.uuid(0)
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        with (
            running_daemon(*options, gpus=1, env=double.env, directory=folder / "one") as one,
            running_daemon(*options, gpus=1, env=double.env, directory=folder / "two") as two,
            two.client() as other,
        ):
            with one.client() as client:
                client.set_power_limit(uuid, 200_000)
                words = rf"changed by another zeusd.*{one.process.pid}"
                with pytest.raises(LeaseHeld, match=words):
                    other.set_power_limit(uuid, 150_000)
                node = real_node(options=Options(nvidia_library=double.library))
                with embed.connect(node, state_dir=str(folder / "embedded")) as embedded:
                    (gpu,) = embedded.node().gpus
                    assert gpu.power_limit_highest_mw == 250_000, "not the value of another"
                    with pytest.raises(LeaseHeld, match="let all processes of this node use one"):
                        embedded.set_power_limit(uuid, 150_000)
                assert double.limit_mw(0) == 200_000
            wait_for(lambda: double.limit_mw(0) == 250_000, "the limit to be back")
            other.set_power_limit(uuid, 150_000)
            assert double.limit_mw(0) == 150_000
        assert double.limit_mw(0) == 250_000


def test_embedding_uses_the_zeusd_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_daemon("--simulate", "1xv100-pcie", gpus=1) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        with embed.connect() as client, daemon.client() as other:
            assert client.node().started_ns == other.node().started_ns
