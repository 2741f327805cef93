"""The output of `zeusctl doctor` in containers, correct ones and wrong ones."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import RunningDaemon, ending, public_directory, running_daemon
from tests.zeusctl.conftest import Ctl
from zeus.device import visible
from zeus_common.processes import has_sys_admin
from zeusctl import checks, machine_checks
from zeusctl.exits import Exit

KIND = "in a podman container"


@pytest.fixture(autouse=True)
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container in the host's pid namespace, with nothing mounted."""
    monkeypatch.setattr(machine_checks, "container", lambda: KIND)
    monkeypatch.setattr(machine_checks, "in_host_pid_namespace", lambda: True)
    monkeypatch.setattr(machine_checks, "mount_point_of", lambda path: "/")


def line_of(out: str, name: str) -> str:
    """The doctor's line with a name, with its advice."""
    before, found, after = out.partition(f"{name:10} ")
    assert found, out
    state = before.splitlines()[-1].strip()
    first, _, rest = after.partition("\n")
    remedy = rest.split("\n")[0].strip() if rest.lstrip().startswith("->") else ""
    return f"{state}: {first} {remedy}".strip()


def test_a_right_container_is_healthy(ctl: Ctl) -> None:
    said = ctl("doctor")
    assert line_of(said.out, "container") == f"ok: {KIND}"
    assert said.code == Exit.OK


def test_a_mounted_socket_file_is_a_fault(
    ctl: Ctl, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "mount_point_of", lambda path: path)
    said = ctl("doctor")
    assert "fault: in a podman container: the socket file itself" in line_of(said.out, "container")
    assert f"-> mount the folder {daemon.directory}" in line_of(said.out, "container")
    assert said.code == Exit.FAILED


def test_zeusd_in_its_own_pid_namespace_is_a_fault_if_the_folder_is_shared(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "in_host_pid_namespace", lambda: False)
    alone = ctl("doctor")
    assert "note: zeusd serves this container alone" in line_of(alone.out, "container")
    assert alone.code == Exit.OK
    monkeypatch.setattr(machine_checks, "mount_point_of", os.path.dirname)
    shared = ctl("doctor")
    assert "fault: zeusd is in this container's own pid namespace" in line_of(
        shared.out, "container"
    )
    assert "--pid=host" in line_of(shared.out, "container")
    assert shared.code == Exit.FAILED


def test_a_client_in_its_own_pid_namespace_passes(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every training job in a container is: zeusd is not to be seen from there."""
    monkeypatch.setattr(machine_checks, "in_host_pid_namespace", lambda: False)
    monkeypatch.setattr(machine_checks, "mount_point_of", os.path.dirname)
    monkeypatch.setattr(machine_checks, "listener_of", lambda path: None)
    said = ctl("doctor")
    assert (line_of(said.out, "container"), said.code) == (f"ok: {KIND}", Exit.OK)


@pytest.fixture(scope="module")
def real() -> Iterator[RunningDaemon]:
    """A node that is not simulated, as far as zeusd knows."""
    with public_directory() as directory:
        double = NvmlDouble(directory, [{}, {}])
        options = ("--nvml-library", double.library)
        with running_daemon(*options, env=double.env, gpus=2, directory=directory) as running:
            yield running


@pytest.mark.parametrize(
    ("admin", "user_namespace", "found"),
    [
        (True, False, ""),
        (False, False, "fault: zeusd has no CAP_SYS_ADMIN"),
        (True, True, "fault: zeusd is in a user namespace"),
    ],
)
def test_a_zeusd_without_the_drivers_right_is_a_fault(
    ctl: Ctl,
    real: RunningDaemon,
    monkeypatch: pytest.MonkeyPatch,
    admin: bool,
    user_namespace: bool,
    found: str,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(checks, "has_sys_admin", lambda pid: asked.append(pid) or admin)
    monkeypatch.setattr(machine_checks, "in_user_namespace", lambda pid: user_namespace)
    said = ctl("--socket", real.socket, "doctor")
    assert asked == [real.process.pid], "the right process is looked at"
    if found:
        assert said.code == Exit.FAILED
        assert found in line_of(said.out, "rights")
    else:
        assert "rights" not in said.out
        assert line_of(said.out, "container") == f"ok: {KIND}"


def test_a_container_with_some_of_the_gpus_learns_which(
    ctl: Ctl, real: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "programs see all GPUs" in line_of(ctl("--socket", real.socket, "doctor").out, "visible")
    monkeypatch.setattr(visible, "within_reach", lambda gpus: [gpus[1]])
    said = line_of(ctl("--socket", real.socket, "doctor").out, "visible")
    assert said.endswith("that may be opened here: a program's GPU 0 is GPU 1 here")


# ------------------------------------------------------------------- what the kernel is asked for


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions themselves again."""
    monkeypatch.undo()


@pytest.mark.usefixtures("kernel")
def test_the_listener_of_a_socket_is_found_while_it_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    assert machine_checks.listener_of(path) is None
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        assert machine_checks.listener_of(path) is None
        listening.listen()
        assert machine_checks.listener_of(path) == os.getpid()


@pytest.mark.usefixtures("kernel")
@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("flag", ["-sys_admin", "-kill"])
def test_the_right_is_read_from_the_kernel(flag: str) -> None:
    with ended("setpriv", f"--bounding-set={flag}", "--inh-caps=-all", "cat") as process:
        assert has_sys_admin(process.pid) == (flag == "-kill")
        assert not machine_checks.in_user_namespace(process.pid)


@pytest.mark.usefixtures("kernel")
@pytest.mark.needs("user namespaces")
def test_a_user_namespace_is_read_from_the_kernel() -> None:
    with ended("unshare", "--user", "--map-root-user", "cat") as process:
        assert machine_checks.in_user_namespace(process.pid)


LOOK = """
import json, os, sys
from zeus.device import visible
from zeusctl import machine_checks
folder, file = sys.argv[1:]
print(json.dumps([
    machine_checks.mount_point_of(folder + "/zeusd.sock"),
    machine_checks.mount_point_of(file),
    machine_checks.mount_point_of("/nowhere"),
    machine_checks.in_host_pid_namespace(),
]))
"""


@pytest.mark.usefixtures("kernel")
@pytest.mark.needs("namespaces")
def test_mounts_and_pid_namespaces_are_read_from_the_kernel(tmp_path: Path) -> None:
    """Also a folder mounted from the file system it lies on, which os.path.ismount does not see."""
    folder, file = tmp_path / "a folder", tmp_path / "file"
    folder.mkdir()
    file.touch()
    mounts = f"mount --bind '{folder}' '{folder}'; mount --bind '{file}' '{file}'; exec \"$@\""
    unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    look = (sys.executable, "-c", LOOK, str(folder), str(file))
    done = subprocess.run(
        [*unshare, "sh", "-ec", mounts, "sh", *look], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [str(folder), str(file), "/", False]


@contextlib.contextmanager
def ended(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a command that prints what it reads, once it does; it ends with the block."""
    with ending(
        subprocess.Popen([*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("there\n")
        process.stdin.flush()
        assert process.stdout.readline() == "there\n"
        yield process
