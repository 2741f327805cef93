"""`python -m zeus.show_env`: shows what `zeus` finds on this machine, and remedies for problems.

It changes nothing: it acquires no lease, sets no GPU, and imports no framework. Each failure is a
line with a remedy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeus_common.installed import overlap
from zeus_common.processes import discard_output, has_sys_admin
from zeus_common.text import group_name, user_name
from zeus_ipc import __version__
from zeus_ipc.sockets import DEFAULT_SOCKET_PATH, SOCKET_ENV, socket_path

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import GpuInfo, NodeInfo

REINSTALL = "install zeusd again: pip install --force-reinstall zeusd"

Row = tuple[str, str]
"""A line of a section: a name, and its text."""

PACKAGES = {
    "zeusd": f"not installed as a package; running {__version__} from a checkout",
    "pyzmq": f"missing; {REINSTALL}",
    "msgpack": f"missing; {REINSTALL}",
    "pydantic": f"missing; {REINSTALL}",
    "nvidia-ml-py": f"missing; {REINSTALL}",
    "torch": "not installed; nothing here needs it",
    "prometheus-client": 'not installed; only zeus.metric needs it: pip install "zeusd[metrics]"',
}
"""The text for each missing package."""


def packages() -> list[Row]:
    """Versions, and missing packages."""
    rows = [(name, _version(name) or missing) for name, missing in PACKAGES.items()]
    other = _version("pynvml")
    if other is not None and other.split(".")[0].isdecimal() and int(other.split(".")[0]) < 12:
        rows.append(
            (
                "pynvml",
                f"{other}, which replaces nvidia-ml-py; remove it: pip uninstall pynvml "
                "&& pip install --force-reinstall nvidia-ml-py",
            )
        )
    mixed = overlap(str(Path(__file__).parent))
    return rows if mixed is None else [*rows, ("zeus", mixed)]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def system() -> list[Row]:
    """Python and the operating system."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return [
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("OS", f"{name}, {platform.system()} {platform.release()} {platform.machine()}"),
    ]


def rights(zeusd: bool) -> list[Row]:
    """The user, and whether the driver lets this process change settings."""
    groups = [f"{group_name(gid)} ({gid})" for gid in sorted({os.getegid(), *os.getgroups()})]
    hint = "zeusd does it for you" if zeusd else "run zeusd to do it for you"
    try:
        capable = has_sys_admin()
    except OSError:
        answer = "not known: /proc is not mounted here"
    else:
        answer = "effective: the driver lets this process set limits and clocks"
        if not capable:
            answer = f"not effective: the driver refuses to set limits and clocks; {hint}"
    return [
        ("user", f"{user_name(os.geteuid())} (uid {os.geteuid()})"),
        ("groups", ", ".join(groups)),
        ("CAP_SYS_ADMIN", answer),
    ]


def unexpected(error: Exception) -> str:
    """The text for an unexpected error."""
    if isinstance(error, ImportError):
        return f"{error}; {REINSTALL}"
    return f"{type(error).__name__}: {error}; please report it with all of this output"


# -------------------------------------------------------------------------------------------- zeusd


TIMEOUT_S = 0.5
"""Time limit for zeusd's reply."""


@dataclass(frozen=True)
class Zeusd:
    """The state of the daemon.

    Attributes:
        found: The doctor's findings.
    """

    path: str
    wanted: bool
    problem: str = ""
    info: NodeInfo | None = None
    found: list[Row] = field(default_factory=list)


def ask_zeusd() -> Zeusd:
    """Queries the daemon that `zeus` would use. Never raises."""
    path = socket_path()
    wanted = bool(os.environ.get(SOCKET_ENV)) or os.path.exists(DEFAULT_SOCKET_PATH)
    if not wanted:
        return Zeusd(
            path,
            wanted,
            "there is no such socket, so this process uses the GPUs directly; start zeusd, "
            f"or name its socket in {SOCKET_ENV}",
        )
    try:
        from zeus_common.checks import of_node
        from zeus_ipc.client import Client
        from zeus_ipc.errors import ZeusIpcError
    except ImportError as error:
        return Zeusd(path, wanted, unexpected(error))
    client = Client(path, timeout_s=TIMEOUT_S)
    try:
        info = client.node()
        facts = [
            (check.name, " -> ".join(filter(None, (check.found, check.remedy))))
            for check in of_node(client, info)
        ]
        facts.append(("round trip", _round_trip(client)))
        return Zeusd(path, wanted, "", info, facts)
    except ZeusIpcError as error:
        return Zeusd(path, wanted, error.message)
    except Exception as error:  # noqa: BLE001 - as of a daemon of another release
        return Zeusd(path, wanted, unexpected(error))
    finally:
        client.close(patient=False)


def _round_trip(client: Client) -> str:
    taken_s = []
    for _ in range(20):
        begun_s = time.perf_counter()
        client.node()
        taken_s.append(time.perf_counter() - begun_s)
    return f"{statistics.median(taken_s) * 1000:.2f} ms (median of {len(taken_s)})"


def daemon_rows(zeusd: Zeusd) -> list[Row]:
    """The zeusd section: what `zeusctl doctor` finds about it."""
    configured = os.environ.get(SOCKET_ENV)
    origin = f"from {SOCKET_ENV}" if configured else f"the default; {SOCKET_ENV} is not set"
    answer = "yes" if zeusd.info is not None else f"no: {zeusd.problem}"
    return [("socket", f"{zeusd.path} ({origin})"), ("reachable", answer), *zeusd.found]


# ------------------------------------------------------------------------------------ GPUs and CPUs


POWERCAP = "/sys/class/powercap"

DRIVER_TIMEOUT_S = 5.0
"""Time limit for listing the GPUs; without persistence mode the driver starts each first."""


def find(zeusd: Zeusd) -> tuple[list[GpuInfo], list[Row]]:
    """The node's GPUs by NVML index, and lines about problems. Never raises."""
    if zeusd.info is not None:
        if zeusd.info.gpus:
            return zeusd.info.gpus, []
        hint = "load its NVIDIA driver" if zeusd.info.driver_version is None else "see nvidia-smi"
        return [], [("GPU", f"none: zeusd finds none on this node; {hint}")]
    if zeusd.wanted:
        return [], [("GPU", "not known while zeusd does not answer: zeus would raise that error")]
    gpus: list[GpuInfo] = []
    notes: list[Row] = []

    def look() -> None:
        try:
            _look(gpus, notes)
        except Exception as error:  # noqa: BLE001 - told as a line
            notes.append(("GPU", f"not known: {unexpected(error)}"))

    # A stuck driver blocks its caller.
    thread = threading.Thread(target=look, name="nvml", daemon=True)
    thread.start()
    thread.join(DRIVER_TIMEOUT_S)
    if thread.is_alive():
        late = f"the driver did not respond within {DRIVER_TIMEOUT_S:g} s; see dmesg and nvidia-smi"
        return list(gpus), [*notes, ("GPU", late)]
    if not gpus and not notes:
        notes.append(("GPU", "none: the driver finds none on this node; see nvidia-smi"))
    return gpus, notes


def _look(gpus: list[GpuInfo], notes: list[Row]) -> None:
    """Queries the driver, as a program without zeusd would."""
    from zeusd.devices.nvml.backend import NvmlBackend
    from zeusd.devices.port import DeviceError
    from zeusd.runtime.devices import inspect_gpu

    nvml = NvmlBackend()
    try:
        nvml.init()
    except DeviceError as error:
        notes.append(("GPU", f"none: {error}; install or load the NVIDIA driver, see nvidia-smi"))
        return
    try:
        for index in range(nvml.device_count()):
            try:
                gpus.append(inspect_gpu(nvml, index)[0].info)
            except DeviceError as error:
                notes.append((f"NVML {index}", f"cannot be used: {error}; see dmesg, or reset it"))
    finally:
        nvml.shutdown()


def cuda() -> list[Row]:
    """The environment variables that decide which GPUs a framework sees."""

    def value(name: str, absent: str) -> Row:
        text = os.environ.get(name)
        return name, f"not set: {absent}" if text is None else repr(text)

    return [
        value("CUDA_VISIBLE_DEVICES", "all GPUs are seen"),
        value("CUDA_DEVICE_ORDER", "CUDA counts fastest first, which is NVML's order if all match"),
    ]


def mapping(gpus: list[GpuInfo], zeusd: Zeusd) -> list[Row]:
    """Each GPU's NVML index and its index in `zeus`, which is the framework's."""
    from zeus.device.visible import visible_gpus
    from zeus.exceptions import ZeusBaseError

    if not gpus:
        return []
    simulated = zeusd.info is not None and zeusd.info.simulated is not None
    rows: list[Row] = []
    unseen = "hidden"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            seen = visible_gpus(gpus, os.environ, simulated=simulated)
            if not seen:
                rows.append(("zeus", "sees none; change or unset CUDA_VISIBLE_DEVICES"))
        except ZeusBaseError as error:
            seen, unseen = [], "?"
            rows.append(("zeus", f"cannot tell GPUs apart: {error.message}"))
    rows += [("note", str(one.message)) for one in warned]
    for gpu in gpus:
        indices = [str(index) for index, one in enumerate(seen) if one.uuid == gpu.uuid]
        name = f"NVML {gpu.index} -> " + (f"zeus {', '.join(indices)}" if indices else unseen)
        text = f"{gpu.name}  {gpu.uuid}  {gpu.pci_address}"
        if gpu.mig_enabled:
            parts = len(gpu.runtime_indices)
            split = f"{parts} partitions: they" if parts > 1 else "MIG is on: its instances"
            text += f"  {split} cannot be measured separately"
        rows.append((name, text))
    return rows


def cpus(zeusd: Zeusd) -> list[Row]:
    """The CPUs that zeusd measures."""
    if zeusd.info is None:
        return [("through zeusd", "none, as none answers")]
    if not zeusd.info.cpus:
        return [("through zeusd", "none: it reads no counter of powercap on this node")]
    return [
        (f"CPU {cpu.index}", f"{cpu.name}{' and its memory' if cpu.dram else ''}, through zeusd")
        for cpu in zeusd.info.cpus
    ]


def zones(zeusd: Zeusd) -> list[Row]:
    """The RAPL counters, and whether this process may read them."""
    root = Path(POWERCAP)
    folders = {
        path.name: path
        for pattern in ("intel-rapl:*/intel-rapl:*:*", "intel-rapl:*")
        for path in root.glob(pattern)
    }
    if not folders:
        hint = "virtual machines have none, and elsewhere: modprobe intel_rapl_msr"
        return [("RAPL", f"none under {root}; {hint}")]
    helped = zeusd.info is not None and bool(zeusd.info.cpus)
    return [(str(path), _zone(path, helped)) for _, path in sorted(folders.items())]


def _zone(path: Path, helped: bool) -> str:
    try:
        name = (path / "name").read_text().strip()
    except OSError:
        name = "without a name"
    try:
        int((path / "energy_uj").read_text())
    except PermissionError:
        hint = "zeusd reads it for you" if helped else "run zeusd to read it for you"
        return f"{name}: not readable, only root may; {hint}"
    except (OSError, ValueError) as error:
        return f"{name}: not readable: {error}; it cannot be measured"
    return f"{name}: readable"


# -------------------------------------------------------------------------------------- the command


def command_line() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m zeus.show_env",
        description="Show what zeus finds on this machine: packages, zeusd, GPUs, CPUs, rights.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    command_line().parse_args(arguments)
    output: Any = sys.stdout
    with contextlib.suppress(AttributeError, ValueError):
        output.reconfigure(errors="backslashreplace")
    try:
        _show_all()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone
        discard_output()
    return 0


def _show_all() -> None:
    _show("Packages", lambda: packages())
    _show("System", lambda: system())
    zeusd = ask_zeusd()
    _show("zeusd", lambda: daemon_rows(zeusd))
    gpus, notes = find(zeusd)
    _show("GPUs", lambda: [*cuda(), *mapping(gpus, zeusd), *notes])
    _show("CPUs and memory", lambda: [*cpus(zeusd), *zones(zeusd)])
    _show("System-on-chip", lambda: [("SoC", "none")])
    _show("Rights", lambda: rights(zeusd.info is not None))


def _show(title: str, rows: Callable[[], Sequence[Row]]) -> None:
    try:
        lines = rows()
    except Exception as error:  # noqa: BLE001 - what is broken here is what the reader looks for
        lines = [("not known", unexpected(error))]
    print(title)
    width = max((len(name) for name, _ in lines), default=0)
    for name, text in lines:
        print(f"  {name:<{width}}  {text}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
