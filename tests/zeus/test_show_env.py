from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import zeus
from tests.support import TIMEOUT_S, RunningDaemon, ending, running_daemon, wait_for
from zeus import show_env
from zeus_common import processes
from zeus_common.installed import overlap
from zeus_ipc import __version__
from zeus_ipc.replies import NodeInfo
from zeus_ipc.sockets import SOCKET_ENV
from zeusd.devices.nvml import backend as real
from zeusd.devices.simulated import SimulatedBackend

Shown = dict[str, dict[str, str]]
Show = Callable[..., Shown]
NvmlBackend = real.NvmlBackend


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xa40,v100-pcie", gpus=3) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without zeusd, RAPL or NVIDIA driver."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", SOCKET_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(show_env, "DEFAULT_SOCKET_PATH", str(tmp_path / "nothing.sock"))
    monkeypatch.setattr(show_env, "POWERCAP", str(tmp_path / "powercap"))
    monkeypatch.setattr(real, "NvmlBackend", lambda: NvmlBackend("/nowhere/libnvidia-ml.so.1"))


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    def show(surprising: bool = False) -> Shown:
        """The output, by section and name."""
        assert show_env.main([]) == 0
        text, errors = capsys.readouterr()
        assert errors == ""
        assert ("please report" in text) is surprising, text
        return sections(text)

    return show


def sections(text: str) -> Shown:
    found: Shown = {}
    for block in text.strip().split("\n\n"):
        title, *lines = block.split("\n")
        rows = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines]
        assert all(len(row) == 2 for row in rows), text
        found[title] = dict(rows)
    return found


# ------------------------------------------------------------------------------------------ zeusd


def test_a_daemon_and_its_gpus_are_shown(
    daemon: RunningDaemon, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET_ENV, daemon.socket)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with daemon.client() as client:
        gpus = client.node().gpus
        begun_s = time.perf_counter()
        found = show()
        took_ms = 1000 * (time.perf_counter() - begun_s)
        assert client.leases() == []  # it has taken none
    zeusd = found["zeusd"]
    assert zeusd["socket"] == f"{daemon.socket} (from {SOCKET_ENV})"
    assert zeusd["reachable"] == "yes"
    assert zeusd["version"] == f"zeusd and zeusctl are both {__version__}"
    assert zeusd["GPUs"] == "zeusd sees 3 GPUs, simulated"
    assert zeusd["policy"].startswith(("you administer", "you may change power_limit of GPUs 0"))
    assert zeusd["restores"] == "no restore is pending"
    assert "visible" not in zeusd  # that is the next section's
    trip = re.fullmatch(r"(\d+\.\d\d) ms \(median of 20\)", zeusd["round trip"])
    assert trip
    assert 0 < float(trip[1]) < took_ms / 10  # the faster half of 20 took less
    shown = found["GPUs"]
    assert shown["CUDA_VISIBLE_DEVICES"] == "'2,0'"
    assert [name for name in shown if name.startswith("NVML")] == [
        "NVML 0 -> zeus 1",
        "NVML 1 -> hidden",
        "NVML 2 -> zeus 0",
    ]
    assert gpus[2].uuid in shown["NVML 2 -> zeus 0"]
    assert gpus[2].name in shown["NVML 2 -> zeus 0"]


@pytest.mark.parametrize("kind", ["missing", "left behind", "silent", "something else"])
def test_a_daemon_that_cannot_be_used_is_a_line_that_says_what_to_do(
    tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(show_env, "TIMEOUT_S", 0.1)
    path = tmp_path / "z.sock"
    monkeypatch.setenv(SOCKET_ENV, str(path))
    expected = {
        "missing": "start zeusd, or name its socket",
        "left behind": "its old socket is still there; start zeusd",
        "silent": "did not answer within 0.1 s; look at",
        "something else": "what answers is not zeusd (not ZMTP 3); check the socket's path",
    }
    with contextlib.ExitStack() as stack:
        if kind != "missing":
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            if kind == "left behind":
                server.close()
            else:
                server.listen()
            if kind == "something else":
                threading.Thread(target=_talk, args=(server,), daemon=True).start()
                stack.callback(server.shutdown, socket.SHUT_RDWR)

        def shown() -> Shown | None:
            found = show()
            return found if expected[kind] in found["zeusd"]["reachable"] else None

        found = wait_for(shown, expected[kind])  # what is slow to answer is silent at first
    assert found["zeusd"]["reachable"].startswith("no: ")
    assert "not known while zeusd does not answer" in found["GPUs"]["GPU"]
    assert found["System-on-chip"] == {"SoC": "none"}


def _talk(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the test is over
            return
        with connection, contextlib.suppress(OSError):  # nobody waits for it any more
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_what_one_check_cannot_find_out_is_its_line_and_the_rest_is_shown(
    daemon: RunningDaemon, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeus_ipc import Client
    from zeus_ipc.errors import RequestRejected

    def refuse(client: Client) -> None:
        raise RequestRejected("not for you")

    monkeypatch.setenv(SOCKET_ENV, daemon.socket)
    monkeypatch.setattr(Client, "leases", refuse)
    zeusd = show()["zeusd"]
    assert zeusd["reachable"] == "yes"
    assert zeusd["pending"].startswith("not for you -> look at zeusd's log")
    assert "round trip" in zeusd


# ------------------------------------------------------------------------------------------- GPUs


def test_without_a_daemon_the_driver_is_asked(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimulatedBackend("3xv100-pcie")
    monkeypatch.setattr(real, "NvmlBackend", lambda: nvml)
    nvml.lose(1)
    found = show()
    assert "this process uses the GPUs directly" in found["zeusd"]["reachable"]
    shown = found["GPUs"]
    assert shown["NVML 0 -> zeus 0"].startswith(nvml.specs[0].model.name)
    assert "fallen off the bus (NVML 15)" in shown["NVML 1"]
    assert nvml.specs[2].uuid in shown["NVML 2 -> zeus 1"]
    assert nvml._initialised == 0  # it was released


def test_without_a_driver_there_is_a_line_that_says_so(show: Show) -> None:
    said = show()["GPUs"]["GPU"]
    assert "cannot load /nowhere/libnvidia-ml.so.1" in said
    assert "install or load the NVIDIA driver" in said


@pytest.mark.parametrize(
    ("driver", "hint"), [(None, "load its NVIDIA driver"), ("595", "see nvidia-smi")]
)
def test_a_daemon_without_gpus_says_where_to_look(driver: str | None, hint: str) -> None:
    info = NodeInfo.model_construct(gpus=[], driver_version=driver)
    line = ("GPU", f"none: zeusd finds none on this node; {hint}")
    assert show_env.find(show_env.Zeusd("", True, info=info)) == ([], [line])


def test_a_driver_that_hangs_delays_nobody(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(show_env, "DRIVER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(show_env, "_look", lambda *_: go_on.wait(TIMEOUT_S))
    assert "the driver did not respond within 0.05 s" in show()["GPUs"]["GPU"]
    go_on.set()


def test_gpus_that_cannot_be_distinguished_are_reported(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "NvmlBackend", lambda: SimulatedBackend("a40,v100-pcie"))
    shown = show()["GPUs"]
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in shown["note"]
    assert {"NVML 0 -> zeus 0", "NVML 1 -> zeus 1"} <= set(shown)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    shown = show()["GPUs"]
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in shown["zeus"]
    assert {"NVML 0 -> ?", "NVML 1 -> ?"} <= set(shown)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert {"NVML 0 -> hidden", "NVML 1 -> zeus 0"} <= set(show()["GPUs"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "change or unset CUDA_VISIBLE_DEVICES" in show()["GPUs"]["zeus"]


# ------------------------------------------------------------------------------- CPUs and rights


def test_counters_of_powercap_are_listed_with_whether_they_can_be_read(
    tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "modprobe intel_rapl_msr" in show()["CPUs and memory"]["RAPL"]
    root = tmp_path / "powercap"
    for path, name in (
        ("intel-rapl:0", "package-0"),
        ("intel-rapl:0/intel-rapl:0:0", "dram"),
        ("intel-rapl:1", "package-1"),
    ):
        (root / path).mkdir(parents=True)
        (root / path / "name").write_text(f"{name}\n")
        (root / path / "energy_uj").write_text("5\n")
    (root / "intel-rapl:1" / "energy_uj").write_text("")
    read_text = Path.read_text

    def guarded(path: Path, *how: Any, **exactly: Any) -> str:
        if path.parent.name == "intel-rapl:0:0" and path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *how, **exactly)

    monkeypatch.setattr(Path, "read_text", guarded)
    shown = show()["CPUs and memory"]
    assert shown[str(root / "intel-rapl:0")] == "package-0: readable"
    assert (
        "dram: not readable, only root may; run zeusd"
        in shown[str(root / "intel-rapl:0/intel-rapl:0:0")]
    )
    assert "package-1: not readable: " in shown[str(root / "intel-rapl:1")]


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        ("000001ffffffffff", "effective: the driver lets"),
        ("0000000000200000", "effective: the driver lets"),
        (
            "000001ffffdfffff",
            "not effective: the driver refuses to set limits and clocks; run zeusd",
        ),
    ],
)
def test_the_capability_is_what_is_effective(
    tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch, bits: str, said: str
) -> None:
    status = tmp_path / "self" / "status"
    status.parent.mkdir()
    status.write_text(f"Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t{bits}\n")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    rights = show()["Rights"]
    assert rights["CAP_SYS_ADMIN"].startswith(said)
    assert f"uid {os.geteuid()}" in rights["user"]
    assert f"({os.getegid()})" in rights["groups"]
    status.unlink()
    assert "not known: /proc" in show()["Rights"]["CAP_SYS_ADMIN"]


# ----------------------------------------------------------------------------------- the command


def test_packages_are_those_installed(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = show()["Packages"]
    assert shown["pyzmq"] == metadata.version("pyzmq")
    assert shown["nvidia-ml-py"] == metadata.version("nvidia-ml-py")
    assert "pynvml" not in shown
    installed = {"pynvml": "11.5.0", "torch": "2.13.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    shown = show()["Packages"]
    assert shown["torch"] == "2.13.0"
    assert "pip install --force-reinstall zeusd" in shown["pyzmq"]
    assert "remove it: pip uninstall pynvml" in shown["pynvml"]
    installed["pynvml"] = "12.0.0"  # is nvidia-ml-py's own companion
    assert "pynvml" not in show()["Packages"]


def test_an_unexpected_failure_is_one_line_and_the_rest_is_shown(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no idea")

    for name in ("system", "cuda", "zones", "rights"):
        monkeypatch.setattr(show_env, name, fail)
    found = show(surprising=True)
    for title in ("System", "GPUs", "CPUs and memory", "Rights"):
        assert found[title] == {
            "not known": "RuntimeError: no idea; please report it with all of this output"
        }
    assert found["System-on-chip"] == {"SoC": "none"}


def run(tmp_path: Path, source: str = "", *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a separate Python, where importing torch ends it."""
    (tmp_path / "torch.py").write_text("import os; os._exit(42)")
    return subprocess.run(
        [sys.executable, "-c", f"{source}\n{COMMAND}", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "LC_ALL": "C"},
    )


COMMAND = "import runpy; runpy.run_module('zeus.show_env', run_name='__main__')"


def test_it_imports_no_framework_and_ends_well(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "SoC" in sections(ran.stdout)["System-on-chip"]


def test_broken_packages_are_lines_too(tmp_path: Path) -> None:
    broken = "import sys; sys.modules.update(zmq=None, pydantic=None, pynvml=None)"
    ran = run(tmp_path, f"import os; os.environ['{SOCKET_ENV}'] = '/nowhere'; {broken}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "install zeusd again" in sections(ran.stdout)["zeusd"]["reachable"]


def test_a_wrong_option_is_the_only_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        show_env.main(["--wrong"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --wrong" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    with ending(
        subprocess.Popen(
            [sys.executable, "-m", "zeus.show_env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_S) == 0


def test_another_zeus_over_this_one_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "zeus"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text((Path(zeus.__file__)).read_text())
    assert overlap(str(package)) is None
    (package / "utils" / "pydantic_v1.py").touch()
    said = overlap(str(package))
    assert said is not None
    assert "`import zeus` gets zeusd's package" in said
    assert "keep one: pip uninstall -y zeus zeus-ml &&" in said
    (package / "__init__.py").write_text('__version__ = "0.16.0"\n')
    said = overlap(str(package))
    assert said is not None
    assert "`import zeus` gets ml-energy/zeus's package" in said


def test_importing_zeus_warns_of_another_over_it(tmp_path: Path) -> None:
    here = Path(zeus.__file__).parent
    shutil.copytree(
        here, tmp_path / "zeus", ignore=shutil.ignore_patterns("__pycache__", "serving", "simulate")
    )
    (tmp_path / "zeus" / "utils" / "pydantic_v1.py").touch()
    ran = subprocess.run(
        [sys.executable, "-c", "import zeus; print(zeus.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{here.parent}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(tmp_path))
    assert ran.stderr.count("ml-energy/zeus and zeusd are both installed") == 1
