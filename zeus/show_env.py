"""`python -m zeus.show_env`: what `zeus` finds on this machine, and what to do about the rest.

It changes nothing: no lease is taken, no GPU is set, no framework is imported. Whatever fails is a
line that says what to do.
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
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from zeus.compat.capabilities import has_sys_admin
from zeus_ipc._version import __version__
from zeus_ipc.installed import overlap
from zeus_ipc.paths import DEFAULT_SOCKET_PATH, SOCKET_ENV, socket_path

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.messages import GpuInfo, LeaseInfo, NodeInfo, Policy

POWERCAP = "/sys/class/powercap"

TIMEOUT_S = 0.5
"""How long zeusd may take for an answer."""

DRIVER_TIMEOUT_S = 5.0
"""How long the driver may take to list its GPUs; without persistence mode it starts each first."""

ROUND_TRIPS = 20

REINSTALL = "install zeusd anew: pip install --force-reinstall zeusd"

PACKAGES = {
    "zeusd": f"not installed as a package; what runs is {__version__} from a checkout",
    "pyzmq": f"missing; {REINSTALL}",
    "msgpack": f"missing; {REINSTALL}",
    "pydantic": f"missing; {REINSTALL}",
    "nvidia-ml-py": f"missing; {REINSTALL}",
    "torch": "not installed; nothing here needs it",
    "prometheus-client": 'not installed; only zeus.metric needs it: pip install "zeusd[metrics]"',
}
"""What to say of each that is not there."""

Row = tuple[str, str]
"""A name, and what is known of it."""


@dataclass(frozen=True)
class Zeusd:
    """What was learnt of the daemon.

    Attributes:
        path: Its socket.
        wanted: Whether `zeus` would use it, or raise the reason why it cannot.
        problem: Why there is no `info`.
        round_trip_s: Median.
        leases_problem: Why `leases` are not known.
        policy: What this user may change.
    """

    path: str
    wanted: bool
    problem: str = ""
    info: NodeInfo | None = None
    round_trip_s: float = 0.0
    leases: list[LeaseInfo] = field(default_factory=list)
    leases_problem: str = ""
    policy: Policy | None = None


def command_line() -> argparse.ArgumentParser:
    """What the command takes."""
    return argparse.ArgumentParser(
        prog="python -m zeus.show_env",
        description="Shows what zeus finds on this machine: packages, zeusd, GPUs, CPUs, rights.",
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    command_line().parse_args(arguments)
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        _show_all()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; nor must Python flush it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_all() -> None:
    _show("Packages", _packages)
    _show("System", _system)
    zeusd = ask_zeusd()
    _show("zeusd", lambda: _daemon(zeusd))
    gpus, notes = _gpus(zeusd)
    _show("GPUs", lambda: [*_cuda(), *_mapping(gpus, zeusd), *notes])
    _show("CPUs and memory", lambda: [*_cpus(zeusd), *_zones(zeusd)])
    _show("System-on-chip", lambda: [("SoC", "none")])
    _show(
        "Rights",
        lambda: [*_user(), _capability(zeusd), *_may_set(gpus, zeusd), *_controls(gpus, zeusd)],
    )


def _show(title: str, rows: Callable[[], Sequence[Row]]) -> None:
    try:
        found = rows()
    except Exception as error:  # noqa: BLE001 - what is broken here is what the reader looks for
        found = [("not known", _unexpected(error))]
    print(title)
    width = max((len(name) for name, _ in found), default=0)
    for name, text in found:
        print(f"  {name:<{width}}  {text}")
    print(flush=True)


def _unexpected(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"{error}; {REINSTALL}"
    return f"{type(error).__name__}: {error}; please report it, with all that is shown here"


# ------------------------------------------------------------------------------ what is installed


def _packages() -> list[Row]:
    rows = [(name, _version(name) or missing) for name, missing in PACKAGES.items()]
    other = _version("pynvml")
    if other is not None and other.split(".")[0].isdigit() and int(other.split(".")[0]) < 12:
        rows.append(
            (
                "pynvml",
                f"{other}, which takes the place of nvidia-ml-py; remove it: pip uninstall pynvml "
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


def _system() -> list[Row]:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return [
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("OS", f"{name}, {platform.system()} {platform.release()} {platform.machine()}"),
    ]


# ------------------------------------------------------------------------------------------ zeusd


def ask_zeusd() -> Zeusd:
    """Asks the daemon that `zeus` would use. Never raises."""
    path = socket_path()
    wanted = bool(os.environ.get(SOCKET_ENV)) or os.path.exists(DEFAULT_SOCKET_PATH)
    if not wanted:
        return Zeusd(
            path,
            wanted,
            "there is no such socket, so GPUs are reached in this process; for a zeusd start it, "
            f"or name its socket in {SOCKET_ENV}",
        )
    try:
        from zeus_ipc.client import Client
        from zeus_ipc.errors import ZeusIpcError
    except ImportError as error:
        return Zeusd(path, wanted, _unexpected(error))
    try:
        with Client(path, timeout_s=TIMEOUT_S, heartbeat=False) as client:
            info = client.node()
            round_trip_s = _round_trip_s(client)
            try:
                leases, problem = client.leases(), ""
            except ZeusIpcError as error:
                leases, problem = [], error.message
            found = Zeusd(path, wanted, "", info, round_trip_s, leases, problem)
            with contextlib.suppress(ZeusIpcError):  # an older zeusd cannot say
                found = replace(found, policy=client.policy())
            return found
    except ZeusIpcError as error:
        return Zeusd(path, wanted, error.message)
    except Exception as error:  # noqa: BLE001 - as of a daemon of another release
        return Zeusd(path, wanted, _unexpected(error))


def _round_trip_s(client: Client) -> float:
    taken_s = []
    for _ in range(ROUND_TRIPS):
        begun_s = time.perf_counter()
        client.node()
        taken_s.append(time.perf_counter() - begun_s)
    return statistics.median(taken_s)


def _daemon(zeusd: Zeusd) -> list[Row]:
    configured = os.environ.get(SOCKET_ENV)
    origin = f"from {SOCKET_ENV}" if configured else f"the default; {SOCKET_ENV} is not set"
    rows = [("socket", f"{zeusd.path} ({origin})")]
    owner = _owner(zeusd.path)
    if owner:
        rows.append(("owner", owner))
    info = zeusd.info
    if info is None:
        return [*rows, ("reachable", f"no: {zeusd.problem}")]
    versions = ", ".join(map(str, info.protocols))
    devices = "real" if info.simulated is None else f"simulated (work goes to {info.simulated})"
    return [
        *rows,
        ("reachable", "yes"),
        ("version", _daemon_version(info)),
        ("protocol", f"{info.protocol} (it speaks {versions})"),
        ("devices", devices),
        ("driver", info.driver_version or "none yet; load the NVIDIA driver, zeusd keeps trying"),
        ("round trip", f"{zeusd.round_trip_s * 1000:.2f} ms (median of {ROUND_TRIPS})"),
    ]


def _daemon_version(info: NodeInfo) -> str:
    if info.daemon_version == __version__:
        return info.daemon_version
    return (
        f"{info.daemon_version}, while this library is {__version__}; if something is missing, "
        "install one release for both"
    )


def _owner(path: str) -> str:
    """Who may connect, as `ls -l` shows it; empty if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    user, group = _user_name(status.st_uid), _group_name(status.st_gid)
    return f"{user}:{group}, mode {status.st_mode & 0o7777:04o}"


# ------------------------------------------------------------------------------------------- GPUs


def _gpus(zeusd: Zeusd) -> tuple[list[GpuInfo], list[Row]]:
    """The node's GPUs by their NVML index, and what is to be said of others. Never raises."""
    if zeusd.info is not None:
        if zeusd.info.gpus:
            return zeusd.info.gpus, []
        hint = "load its NVIDIA driver" if zeusd.info.driver_version is None else "see nvidia-smi"
        return [], [("GPU", f"none: zeusd finds none on this node; {hint}")]
    if zeusd.wanted:
        return [], [("GPU", "not known while zeusd does not answer: zeus would raise that error")]
    found: list[GpuInfo] = []
    notes: list[Row] = []

    def look() -> None:
        try:
            _look(found, notes)
        except Exception as error:  # noqa: BLE001 - told as a line
            notes.append(("GPU", f"not known: {_unexpected(error)}"))

    # A driver that is stuck keeps whoever asks it.
    thread = threading.Thread(target=look, name="nvml", daemon=True)
    thread.start()
    thread.join(DRIVER_TIMEOUT_S)
    if thread.is_alive():
        late = f"the driver did not answer within {DRIVER_TIMEOUT_S:g} s; see dmesg and nvidia-smi"
        return list(found), [*notes, ("GPU", late)]
    if not found and not notes:
        notes.append(("GPU", "none: the driver finds none on this node; see nvidia-smi"))
    return found, notes


def _look(found: list[GpuInfo], notes: list[Row]) -> None:
    """Asks the driver, as a program without a zeusd would."""
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
                found.append(inspect_gpu(nvml, index)[0].info)
            except DeviceError as error:
                notes.append((f"NVML {index}", f"cannot be used: {error}; see dmesg, or reset it"))
    finally:
        nvml.shutdown()


def _cuda() -> list[Row]:
    def value(name: str, absent: str) -> Row:
        text = os.environ.get(name)
        return name, f"not set: {absent}" if text is None else repr(text)

    return [
        value("CUDA_VISIBLE_DEVICES", "all GPUs are seen"),
        value("CUDA_DEVICE_ORDER", "CUDA counts fastest first, which is NVML's order if all match"),
    ]


def _mapping(gpus: list[GpuInfo], zeusd: Zeusd) -> list[Row]:
    """NVML's index and that of `zeus`, which is the framework's, of each GPU."""
    from zeus.device.visible import visible_gpus
    from zeus.exceptions import ZeusBaseError

    if not gpus:
        return []
    simulated = zeusd.info is not None and zeusd.info.simulated is not None
    rows: list[Row] = []
    unseen = "hidden"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            seen = visible_gpus(gpus, os.environ, simulated=simulated)
            if not seen:
                rows.append(("zeus", "sees none; change or unset CUDA_VISIBLE_DEVICES"))
        except ZeusBaseError as error:
            seen, unseen = [], "?"
            rows.append(("zeus", f"cannot tell GPUs apart: {error.message}"))
    rows += [("note", str(one.message)) for one in told]
    order = {gpu.uuid: index for index, gpu in enumerate(seen)}
    for gpu in gpus:
        index = order.get(gpu.uuid)
        name = f"NVML {gpu.index} -> " + (unseen if index is None else f"zeus {index}")
        mig = "  MIG is on: its instances cannot be measured apart" if gpu.mig_enabled else ""
        rows.append((name, f"{gpu.name}  {gpu.uuid}  {gpu.pci_address}{mig}"))
    return rows


# ------------------------------------------------------------------------------------------- CPUs


def _cpus(zeusd: Zeusd) -> list[Row]:
    if zeusd.info is None:
        return [("through zeusd", "none, as none answers")]
    if not zeusd.info.cpus:
        return [("through zeusd", "none: it reads no counter of powercap on this node")]
    return [
        (f"CPU {cpu.index}", f"{cpu.name}{' and its memory' if cpu.dram else ''}, through zeusd")
        for cpu in zeusd.info.cpus
    ]


def _zones(zeusd: Zeusd) -> list[Row]:
    """The counters of RAPL, and whether this process may read them."""
    root = Path(POWERCAP)
    zones = {
        path.name: path
        for pattern in ("intel-rapl:*/intel-rapl:*:*", "intel-rapl:*")
        for path in root.glob(pattern)
    }
    if not zones:
        hint = "virtual machines have none, and elsewhere: modprobe intel_rapl_msr"
        return [("RAPL", f"none under {root}; {hint}")]
    helped = zeusd.info is not None and bool(zeusd.info.cpus)
    return [(str(path), _zone(path, helped)) for _, path in sorted(zones.items())]


def _zone(path: Path, helped: bool) -> str:
    try:
        name = (path / "name").read_text().strip()
    except OSError:
        name = "without a name"
    try:
        int((path / "energy_uj").read_text())
    except PermissionError:
        hint = "zeusd reads it for you" if helped else "have a zeusd read it for you"
        return f"{name}: not readable, only root may; {hint}"
    except (OSError, ValueError) as error:
        return f"{name}: not readable: {error}; it cannot be measured"
    return f"{name}: readable"


# ----------------------------------------------------------------------------------------- rights


def _user() -> list[Row]:
    groups = [f"{_group_name(gid)} ({gid})" for gid in sorted({os.getegid(), *os.getgroups()})]
    return [
        ("user", f"{_user_name(os.geteuid())} (uid {os.geteuid()})"),
        ("groups", ", ".join(groups)),
    ]


def _capability(zeusd: Zeusd) -> Row:
    name = "CAP_SYS_ADMIN"
    try:
        effective = has_sys_admin()
    except OSError:
        return name, "not known: /proc is not mounted here"
    if effective:
        return name, "effective: the driver lets this process set limits and clocks"
    hint = "zeusd does it for you" if zeusd.info is not None else "have a zeusd do it for you"
    return name, f"not effective: the driver refuses to set limits and clocks; {hint}"


def _may_set(gpus: list[GpuInfo], zeusd: Zeusd) -> list[Row]:
    """Whether this user may set each GPU's power limit, and why."""
    return [(f"may I set limits on NVML {gpu.index}", _answer(gpu, zeusd)) for gpu in gpus]


def _answer(gpu: GpuInfo, zeusd: Zeusd) -> str:
    if not gpu.supports.power_limit:
        return f"no, because {gpu.name} offers none"
    if zeusd.info is None:
        privileged = False
        if zeusd.wanted:
            return f"no, because zeusd does not answer: {zeusd.problem}"
        with contextlib.suppress(OSError):
            privileged = has_sys_admin()
        if privileged:
            return "yes, because this process has CAP_SYS_ADMIN and no zeusd runs"
        return (
            "no, because no zeusd runs, and setting limits in this process needs root or "
            "CAP_SYS_ADMIN"
        )
    found = None if zeusd.policy is None else zeusd.policy.gpus.get(gpu.uuid, {}).get("power_limit")
    if found is None:
        return "not known: this zeusd cannot say; update it"
    if not found.allowed:
        return f"no, because {found.why}"
    ranges = " or ".join(f"{low / 1000:g} to {high / 1000:g} W" for low, high in found.ranges)
    return f"yes, because zeusd lets you{f' set {ranges}' if ranges else ''}"


def _controls(gpus: list[GpuInfo], zeusd: Zeusd) -> list[Row]:
    """What each GPU lets be changed, and who holds it."""
    from zeus_ipc.messages import Control

    rows: list[Row] = []
    for gpu in gpus:
        offered = [one.value for one in Control if getattr(gpu.supports, one.value)]
        rows.append((f"NVML {gpu.index} offers", ", ".join(offered) or "nothing to set"))
    if zeusd.info is None:
        return rows
    rows.append(("leasable", _leasable(zeusd.info)))
    if zeusd.leases_problem:
        return [*rows, ("leases", f"not known: {zeusd.leases_problem}")]
    number = {gpu.uuid: gpu.index for gpu in gpus}
    for one in zeusd.leases:
        holder = f"user {_user_name(one.uid)}" + (f", pid {one.pid}" if one.pid else "")
        where = f"NVML {number.get(one.gpu, one.gpu)}"
        rows.append(("leased", f"{one.control.value} of {where} by {holder}"))
    return rows if zeusd.leases else [*rows, ("leased", "nothing at the moment")]


def _leasable(info: NodeInfo) -> str:
    if info.simulated is not None:
        return "all of it by anybody, as the GPUs are simulated, unless zeusd.toml has rules"
    if os.geteuid() == 0:
        return "all of it, as root, unless zeusd.toml says otherwise or this is a container"
    return (
        "what the [[allow]] rules of zeusd.toml let you, or else what lowers power if you are in "
        "the group zeus; zeusd says so when it is asked for"
    )


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


if __name__ == "__main__":
    sys.exit(main())
