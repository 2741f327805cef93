from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ending, running_daemon
from zeus import _node
from zeus.device import get_gpus
from zeus.exceptions import ZeusGPUInitError, ZeusGPULeaseHeldError
from zeus_common.text import user_name


@pytest.mark.parametrize(("value", "seconds"), [("", None), ("0.5", 0.5), ("1800", 1800.0)])
def test_the_stall_timeout_is_seconds(
    monkeypatch: pytest.MonkeyPatch, value: str, seconds: float | None
) -> None:
    monkeypatch.setenv(_node.STALL_TIMEOUT_ENV, value)
    assert _node.stall_timeout_s() == seconds


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf"])
def test_another_stall_timeout_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(_node.STALL_TIMEOUT_ENV, value)
    with pytest.raises(ZeusGPUInitError, match="must be a number of seconds"):
        _node.stall_timeout_s()


def test_a_socket_that_a_stopped_zeusd_left_behind_is_no_zeusd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "zeusd.sock")
    monkeypatch.delenv("ZEUSD_SOCK_PATH", raising=False)
    monkeypatch.setattr(_node, "DEFAULT_SOCKET_PATH", path)
    monkeypatch.setattr(_node, "_client", None)
    monkeypatch.setattr("zeusd.embed.connect", lambda: "in this process")
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(path)
    assert _node.get_client() == "in this process"
    monkeypatch.setattr(_node, "_client", None)
    monkeypatch.setenv("ZEUSD_SOCK_PATH", path)
    with pytest.raises(ZeusGPUInitError, match="start zeusd"):
        _node.get_client()
    monkeypatch.delenv("ZEUSD_SOCK_PATH")
    with running_daemon("--simulate", "v100", directory=tmp_path) as daemon:
        assert daemon.socket == path
        assert _node._is_served(path)


def test_a_holder_is_named_by_user_and_command_and_the_gpu_by_its_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold = """
import sys
from zeus_ipc.client import Client
client = Client()
client.set_power_limit(client.node().gpus[2].uuid, 200_000)
print("held", flush=True)
sys.stdin.read()
"""
    with running_daemon("--simulate", "3xv100:setter_ms=0", gpus=3) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        monkeypatch.setattr(_node, "_client", None)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with ending(subprocess.Popen([sys.executable, "-c", hold], text=True, **pipes)) as holder:
            assert holder.stdout is not None
            assert holder.stdin is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ZeusGPULeaseHeldError) as refused:
                get_gpus().set_power_management_limit(0, 220_000)
            holder.stdin.close()
    named = f"process {holder.pid} (python"
    assert refused.value.message.startswith(f"power_limit of GPU 0 is held by {named}")
    assert f") of user {user_name(os.getuid())} for " in refused.value.message
