"""One engine at a time changes a GPU, whatever their state directories."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import ended, forked, public_directory, running_daemon, wait_for
from zeus_ipc.controls import Control
from zeus_ipc.errors import LeaseHeld
from zeusd import embed
from zeusd.devices.vendors import Options
from zeusd.nodes import real_node
from zeusd.runtime.gpu_locks import GpuLocks


@contextlib.contextmanager
def another_process(directory: Path, gpu: str) -> Iterator[int]:
    """The pid of a process that has taken the lock of a GPU."""
    taken, say = os.pipe()

    def take() -> None:
        assert GpuLocks(str(directory)).take(gpu) is None
        os.write(say, b"x")
        signal.pause()

    pid = forked(take)
    os.close(say)
    try:
        assert os.read(taken, 1) == b"x"
        yield pid
    finally:
        os.close(taken)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL


def test_a_lock_excludes_engines_of_this_process_and_of_others(tmp_path: Path) -> None:
    directory = tmp_path / "gpus"
    first, second = GpuLocks(str(directory)), GpuLocks(str(directory))
    assert first.take("GPU-0") is first.take("GPU-0") is None
    assert f"(pid {os.getpid()})" in second.take("GPU-0").message
    assert second.take("GPU-1") is None, "another GPU"
    first.release("GPU-0")
    assert second.take("GPU-0") is None
    second.close()
    assert second.initial("GPU-0") == {}
    assert first.take("GPU-0", {Control.POWER_LIMIT: (250_000,)}) is None
    assert second.initial("GPU-0") == {Control.POWER_LIMIT: (250_000,)}
    with another_process(directory, "GPU-1") as pid:
        assert f"(pid {pid})" in first.take("GPU-1").message
    assert first.take("GPU-1") is None, "the kernel frees it"
    first.close()


def test_a_lock_whose_file_is_removed_is_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with all of /run/zeusd."""
    directory = tmp_path / "gpus"
    first, second = GpuLocks(str(directory)), GpuLocks(str(directory))

    def refused() -> None:
        assert second.take("GPU-0") is not None

    for again in (first.verify, lambda: first.take("GPU-0")):
        assert first.take("GPU-0") is None
        shutil.rmtree(directory)
        again()
        assert (directory / "GPU-0").exists()
        assert ended(forked(refused)) == 0
    shutil.rmtree(directory)
    with another_process(directory, "GPU-1") as pid:
        (directory / "GPU-1").rename(directory / "GPU-0")
        first.verify()
        first.verify()
    (record,) = caplog.records
    assert f"changed by another zeusd or training process (pid {pid})" in record.message
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
            monkeypatch.setenv("ZEUSD_SOCK_PATH", two.socket)
            with embed.connect() as same:  # the zeusd that runs
                assert same.node().started_ns == other.node().started_ns
        assert double.limit_mw(0) == 250_000
