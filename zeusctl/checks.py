"""The checks of `zeusctl doctor`: each says what it found, and how to fix what is wrong."""

from __future__ import annotations

import ctypes
import grp
import importlib.util
import os
import shutil
import stat
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zeus_ipc import __version__
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.installed import overlap
from zeus_ipc.processes import has_sys_admin
from zeus_ipc.users import named
from zeusctl import containers, machine_checks
from zeusctl.parts import on_the_bus
from zeusctl.reports import Check
from zeusctl.session import Session, seconds_since
from zeusctl.text import (
    count,
    duration,
    energy,
    gpus_text,
    split,
    user_name,
    value_text,
)

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo, NodeInfo

LIBRARY = "libnvidia-ml.so.1"
GROUP, ADMIN_GROUP = "zeus", "zeus-admin"
SYSTEMD = "/run/systemd/system"
"""This folder exists if systemd booted the machine."""
UNITS = ("zeusd.service", "zeusd.socket", "zeusd-stream.socket")
CONFIGURATION = "/etc/zeusd/zeusd.toml"
LATE_S = 2.0
"""A device whose newest tick is older than this is not being sampled."""


def _ok(name: str, found: str) -> Check:
    return Check(name=name, state="ok", found=found, remedy="")


def _note(name: str, found: str, remedy: str = "") -> Check:
    return Check(name=name, state="note", found=found, remedy=remedy)


def _fault(name: str, found: str, remedy: str) -> Check:
    return Check(name=name, state="fault", found=found, remedy=remedy)


def examine(session: Session) -> Iterator[Check]:
    """Runs all checks, from the hardware up to the job's environment."""
    node, connection = _connect(session)
    simulated = node is not None and node.simulated is not None
    if not simulated:
        for check in _hardware():
            if node is not None and node.gpus and check.state == "fault":
                # Only zeusd needs them; this process may be in a container without them.
                found = f"{check.found} as seen from here, but zeusd has its GPUs"
                yield _note(check.name, found)
            else:
                yield check
    yield connection
    yield from _package()
    yield from _groups(node)
    yield from _systemd(simulated)
    yield from _configuration(node)
    yield from _container(session, node)
    if node is not None:
        yield from of_node(session, node)
        if not simulated:
            yield from machine_checks.accounting_checks()


def _package() -> Iterator[Check]:
    """Yields a fault if ml-energy/zeus is installed over the library."""
    found = importlib.util.find_spec("zeus")
    folder = found is not None and found.origin is not None and os.path.dirname(found.origin)
    problem = overlap(folder) if folder else None
    if problem is not None:
        what, _, remedy = problem.partition("; keep one: ")
        yield _fault("package", what, f"keep one: {remedy}")


def of_node(session: Session, node: NodeInfo) -> Iterator[Check]:
    """Runs the checks of a zeusd that answers, and of its GPUs."""
    yield _version(node)
    for one in node.problems:
        since = duration(seconds_since(one.since_ns))
        yield _fault(one.part, f"{one.cause}, for {since}", f"`{one.command}`")
    yield _gpus(node)
    checks: tuple[Callable[[Session, NodeInfo], Check], ...] = (
        _policy,
        _sampling,
        _users,
        _ledger,
        _pending,
        _site_limits,
        _visible,
    )
    for check in checks:
        try:
            yield check(session, node)
        except ZeusIpcError as error:
            name = check.__name__.strip("_")
            yield _fault(name, error.message, "look at zeusd's log (`journalctl -u zeusd`)")


def _hardware() -> Iterator[Check]:
    """Checks driver and library of the vendor whose GPUs are present."""
    from zeusctl.machine_checks import amd_checks, gpus_are_amds, vendors_check

    yield from vendors_check()
    yield from amd_checks() if gpus_are_amds() else (_driver(), _library())


def _driver() -> Check:
    version = Path("/proc/driver/nvidia/version")
    try:
        text = version.read_text().splitlines()[0]
    except (OSError, IndexError):
        if Path("/sys/module/nvidia").exists():
            return _ok("driver", "the kernel module nvidia is loaded")
        return _fault(
            "driver",
            "the NVIDIA driver is not loaded",
            "install it, or `modprobe nvidia`; on a machine without GPUs try `zeusd serve "
            "--simulate 4xv100-pcie`",
        )
    return _ok("driver", text.removeprefix("NVRM version: ").strip())


def _library() -> Check:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return _fault(
            "library",
            f"{LIBRARY} cannot be loaded ({error})",
            "install the driver's libraries; in a container start it with the NVIDIA toolkit "
            "(--gpus, or NVIDIA_DRIVER_CAPABILITIES=utility)",
        )
    return _ok("library", f"{LIBRARY} can be loaded")


def _connect(session: Session) -> tuple[NodeInfo | None, Check]:
    path = session.socket
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(path)
        remedy = "start zeusd (`systemctl start zeusd`), or name its socket in $ZEUSD_SOCK_PATH"
        if not os.path.isdir(folder):
            remedy += f"; in a container mount the host's folder {folder}"
        return None, _fault("socket", f"there is no {path}", remedy)
    except PermissionError:
        remedy = f"let this user enter {os.path.dirname(path)}"
        return None, _fault("socket", f"{path} cannot be seen", remedy)
    if not stat.S_ISSOCK(mode):
        return None, _fault("socket", f"{path} is not a socket", "name the right path")
    try:
        node = session.node
    except ZeusIpcError as error:
        found, _, remedy = error.message.rpartition("; ")
        return None, _fault("socket", found, remedy)
    since = duration(seconds_since(node.started_ns))
    return node, _ok("socket", f"{path} answers; zeusd {node.daemon_version} is up {since}")


def _groups(node: NodeInfo | None) -> Iterator[Check]:
    if os.geteuid() == 0 or (node is not None and node.simulated is not None):
        return
    mine = {os.getegid(), *os.getgroups()}
    for name in (GROUP, ADMIN_GROUP):
        try:
            group = grp.getgrnam(name)
        except KeyError:
            continue
        user = user_name(os.geteuid())
        if group.gr_gid in mine:
            yield _ok("group", f"this process is in group {name}")
        elif user in group.gr_mem:
            yield _fault(
                "group",
                f"{user} was added to group {name} after this session began",
                f"log in again, or run `newgrp {name}`",
            )


def _systemd(simulated: bool) -> Iterator[Check]:
    if simulated or not Path(SYSTEMD).is_dir() or shutil.which("systemctl") is None:
        return
    for unit in UNITS:
        shown = _output("systemctl", "show", unit, "--property=LoadState,ActiveState,UnitFileState")
        if shown is None:
            yield _note("systemd", "systemctl does not answer", "see what `systemctl status` says")
            return
        state = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        if state.get("LoadState") != "loaded":
            remedy = "run scripts/install, or go on if zeusd is run by other means"
            yield _note("systemd", f"{unit} is not installed", remedy)
            return
        if state.get("ActiveState") != "active":
            remedy = f"`systemctl start {unit}`, and `journalctl -u {unit}` if it does not stay"
            said = _last_error(unit)
            found = f"{unit} is {state.get('ActiveState')}" + (f"; it said: {said}" if said else "")
            yield _fault("systemd", found, remedy)
            return
    yield _ok("systemd", "zeusd's units are active")


def _last_error(unit: str) -> str:
    """Returns the newest error in a unit's log; empty if there is none, or this user may not read
    it.
    """
    options = ("-p", "err", "-n", "1", "-o", "cat", "--no-pager", "-q")
    return " ".join((_output("journalctl", "-u", unit, *options) or "").split())


def _output(*command: str) -> str | None:
    """Returns what a program prints; None if it cannot be run or does not end."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None


def _configuration(node: NodeInfo | None) -> Iterator[Check]:
    """Checks the file that zeusd would read at its next start: someone may have broken it since the
    last.
    """
    in_force = [] if node is None else node.findings
    for sentence in in_force:
        yield _note("config", sentence, "correct the rule in zeusd.toml, or delete it, and reload")
    path = Path(CONFIGURATION)
    if not path.exists() or (node is not None and node.simulated is not None):
        return
    if not os.access(path, os.R_OK):
        yield _note("config", f"{path} cannot be read by this user", "ask as root")
        return
    from zeusd.config import ConfigError, load
    from zeusd.config_check import findings

    try:
        found = findings(load(str(path)), None if node is None else node.gpus or None)
    except ConfigError as error:
        text = str(error).replace("\n", "; ")
        yield _fault("config", text, "correct it: zeusd would not start, or reload, with it")
        return
    for sentence in found:
        if sentence not in in_force:
            yield _note("config", f"{path}: {sentence}", "correct the rule, or delete it")
    if not found:
        yield _ok("config", f"{path} is valid")


def _container(session: Session, node: NodeInfo | None) -> Iterator[Check]:
    kind = containers.kind()
    if not kind:
        return
    path = os.path.abspath(session.socket)
    folder = os.path.dirname(path)
    mounted = containers.mount_point_of(path)
    if mounted == path:
        yield _fault(
            "container",
            f"{kind}: the socket file itself is mounted, and will not work after zeusd restarts",
            f"mount the folder {folder} instead",
        )
        return
    wrong = [] if node is None else list(_own_zeusd(session, node, shared=mounted == folder))
    yield from wrong or [_ok("container", kind)]


def _own_zeusd(session: Session, node: NodeInfo, shared: bool) -> Iterator[Check]:
    """Checks a zeusd that runs in this container; yields nothing if it runs elsewhere."""
    zeusd = containers.listener_of(session.socket)
    if zeusd is None:
        return
    if not containers.in_host_pid_namespace():
        remedy = "start its container with --pid=host (Kubernetes: hostPID: true)"
        if shared:
            found = (
                "zeusd is in this container's own pid namespace, and refuses all clients outside"
            )
            yield _fault("container", found, remedy)
        else:
            found = "zeusd serves this container alone: it would not see processes outside"
            yield _note(
                "container", found, f"{remedy}, and share {os.path.dirname(session.socket)}"
            )
    if node.simulated is not None:
        return
    try:
        if not has_sys_admin(zeusd):
            found = "zeusd has no CAP_SYS_ADMIN, so the driver refuses every change"
            yield _fault("rights", found, "start its container with --cap-add SYS_ADMIN")
        elif containers.in_user_namespace(zeusd):
            found = "zeusd is in a user namespace, so the driver refuses every change"
            yield _fault("rights", found, "start it as root, without --userns or userns-remap")
    except OSError:
        return  # it has just ended, which another line reports


def _version(node: NodeInfo) -> Check:
    if node.daemon_version == __version__:
        return _ok("version", f"zeusd and zeusctl are both {__version__}")
    return _note(
        "version",
        f"zeusd is {node.daemon_version} and zeusctl {__version__}; both speak protocol "
        f"{node.protocol}",
        "use matching releases if something is missing",
    )


def _gpus(node: NodeInfo) -> Check:
    if node.quiesced_ns is not None:
        since = duration(seconds_since(node.quiesced_ns))
        return _fault("GPUs", f"zeusd is quiesced, since {since}", "`zeusctl resume`")
    if node.unusable:
        remedy = "see the kernel log (Xid); a reset or a reboot may help"
        return _fault("GPUs", "; ".join(node.unusable), remedy)
    if not node.gpus:
        return _fault(
            "GPUs",
            "zeusd sees no GPUs",
            "see the lines above",
        )
    found = f"zeusd sees {count(len(node.gpus), 'GPU')}" + (", simulated" if node.simulated else "")
    known = {gpu.pci_address.lower()[4:] for gpu in node.gpus}
    lost = [] if node.simulated else sorted({*on_the_bus()} - known)
    if lost:
        remedy = f"`sudo dmesg | grep -iE 'xid|nvrm|{lost[0]}' | tail`; the GPU needs a reset"
        return _fault("GPUs", f"{found}, and not {', '.join(lost)} on the PCI bus", remedy)
    parts = [
        f"GPU {gpu.index}: {split(gpu.runtime_indices)}" for gpu in node.gpus if gpu.mig_enabled
    ]
    if parts:
        remedy = "limits and energy are those of the whole GPU, shared by its parts"
        return _note("GPUs", f"{found}; {', '.join(parts)}", remedy)
    return _ok("GPUs", found)


def _policy(session: Session, node: NodeInfo) -> Check:
    policy = session.client.policy()
    if policy.admin:
        return _ok("policy", "you administer this node's GPUs")
    allowed: dict[str, list[str]] = {}
    why = ""
    for gpu in node.gpus:
        for control, permission in policy.gpus.get(gpu.uuid, {}).items():
            if permission.allowed:
                allowed.setdefault(control, []).append(str(gpu.index))
            elif not why:
                why = permission.why
    if allowed:
        parts = [f"{control} of {gpus_text(gpus)}" for control, gpus in allowed.items()]
        return _ok("policy", "you may change " + "; ".join(parts))
    if not node.gpus:
        return _note("policy", "there are no GPUs")
    return _note("policy", "read-only for you", why.rpartition("; ")[2])


def _sampling(session: Session, node: NodeInfo) -> Check:
    metrics = session.client.metrics()
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in node.gpus}
    late = []
    for source in metrics.sources:
        age_s = (metrics.t_ns - source.t_ns) / 1e9
        if age_s > LATE_S + 10 * source.tick_ns / 1e9:
            late.append(f"{names.get(source.source, source.source)} ({duration(age_s)})")
    seen = {source.source for source in metrics.sources}
    blind = [gpu for gpu in node.gpus if gpu.uuid not in seen and not gpu.has_sensor]
    seen.update(gpu.uuid for gpu in blind)
    if (metrics.t_ns - metrics.started_ns) / 1e9 > LATE_S:  # else it has only just started
        late += [name for uuid, name in names.items() if uuid not in seen]
    if node.quiesced_ns is not None:
        return _note("sampling", "paused while zeusd is quiesced")
    if late:
        return _fault(
            "sampling",
            f"no new samples of {', '.join(late)}",
            "see `nvidia-smi` and the kernel log; zeusd keeps retrying",
        )
    if not metrics.sources:
        return _note("sampling", "no sensors to sample")
    found = f"{count(len(metrics.sources), 'device')} sampled"
    for gpu in blind:
        found += f"; GPU {gpu.index} ({gpu.name}) has no sensor of energy or power"
    return _ok("sampling", found)


def _users(session: Session, node: NodeInfo) -> Check:
    users = session.client.metrics().users
    limited = [user for user in users if user.limited]
    hostile = [user for user in users if user.faults or user.refused]
    if limited:
        names = ", ".join(user_name(user.uid) for user in limited)
        return _note(
            "users",
            f"requests of {names} are rate-limited",
            "use fewer or slower clients, or raise [server] requests_per_second in zeusd.toml",
        )
    if hostile:
        names = ", ".join(user_name(user.uid) for user in hostile)
        return _note(
            "users",
            f"connections of {names} were refused or broke the protocol since zeusd started",
            "zeusd's log says why, once a minute",
        )
    return _ok("users", "no user was refused or rate-limited")


def _ledger(session: Session, node: NodeInfo) -> Check:
    ledger = session.client.metrics().ledger
    if ledger is None:
        return _note("ledger", "zeusd keeps no energy ledger")
    if any(problem.part == "ledger" for problem in node.problems):
        return _note("ledger", "it is not used, see above")
    if ledger.damaged:
        return _note(
            "ledger",
            f"a damaged ledger was moved aside: {', '.join(ledger.damaged)}",
            "restore it from a copy, or delete it",
        )
    total_j = sum(ledger.counted_uj.values()) / 1e6
    held = len({one.gpu for one in ledger.held})
    return _ok("ledger", f"{energy(total_j)} are charged, {count(held, 'GPU')} allocated")


def _pending(session: Session, node: NodeInfo) -> Check:
    index = {gpu.uuid: gpu.index for gpu in node.gpus}
    waiting = [lease for lease in session.client.leases() if lease.trouble is not None]
    if not waiting:
        return _ok("restores", "no restore is pending")
    first = waiting[0]
    target = value_text(first.control.value, first.back.value)
    trouble = named(first.trouble or "", index)
    since_s = seconds_since(first.pending_ns or time.monotonic_ns())
    missing = [one.gpu for one in waiting if index and one.gpu not in index]
    remedy = "when the GPU answers again, run `zeusctl reset` to restore at once"
    if missing:
        remedy = f"if the GPU was removed for good, `sudo zeusctl reset {missing[0]} --forget`"
    return _fault(
        "restores",
        f"{count(len(waiting), 'control')} could not be restored; the first: {first.control.value} "
        f"of GPU {index.get(first.gpu, first.gpu)} to {target}: {trouble} "
        f"(pending for {duration(since_s)})",
        f"zeusd keeps retrying; {remedy}",
    )


def _site_limits(session: Session, node: NodeInfo) -> Check:
    from zeusctl.views import read_states

    states, _ = read_states(session.client, node.gpus) if node.quiesced_ns is None else ({}, {})
    above = []
    for gpu in node.gpus:
        limit, site = getattr(states.get(gpu.uuid), "power_limit_mw", None), gpu.power_limit_site_mw
        if limit is not None and site is not None and limit > site:
            above.append(f"GPU {gpu.index} ({limit / 1000:g} W, site limit {site / 1000:g} W)")
    if not above:
        return _ok("limits", "no GPU is above its site limit")
    return _note(
        "limits",
        f"above the site limit: {', '.join(above)}",
        "`zeusctl reset all` lowers them now; `enforce = true` in zeusd.toml keeps them there",
    )


def _visible(session: Session, node: NodeInfo) -> Check:
    from zeus.device.visible import visible_gpus
    from zeus.exceptions import ZeusBaseError

    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = visible_gpus(node.gpus, os.environ, node.simulated is not None)
    except ZeusBaseError as error:
        return _fault("visible", f"CUDA_VISIBLE_DEVICES={text}: {error}", "correct it")
    mapping = ", ".join(_mapped(number, gpu) for number, gpu in enumerate(seen))
    if text is None:
        found = "CUDA_VISIBLE_DEVICES is unset: programs see all GPUs"
        if len(seen) < len(node.gpus):
            found += f" that may be opened here: {mapping}"
        return _ok("visible", found)
    if not seen:
        remedy = "name GPUs by index or UUID, each once"
        return _fault("visible", f"with CUDA_VISIBLE_DEVICES={text} programs see no GPU", remedy)
    return _ok("visible", f"CUDA_VISIBLE_DEVICES={text}: {mapping}")


def _mapped(number: int, gpu: GpuInfo) -> str:
    return f"a program's GPU {number} is GPU {gpu.index} here"
