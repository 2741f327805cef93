"""The checks of `zeusctl doctor`: each says what it found, and how to fix what is wrong."""

from __future__ import annotations

import grp
import importlib.util
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zeus_common.checks import Check, fault, note, of_node, ok
from zeus_common.installed import overlap
from zeus_common.processes import has_sys_admin, output_of
from zeus_common.text import duration, seconds_since, user_name
from zeus_ipc.errors import ZeusIpcError
from zeusctl import machine_checks
from zeusctl.session import Session

if TYPE_CHECKING:
    from zeus_ipc.replies import NodeInfo

GROUP, ADMIN_GROUP = "zeus", "zeus-admin"
SYSTEMD = "/run/systemd/system"
"""This folder exists if systemd booted the machine."""
UNITS = ("zeusd.service", "zeusd.socket", "zeusd-stream.socket")
CONFIGURATION = "/etc/zeusd/zeusd.toml"


def examine(session: Session) -> Iterator[Check]:
    """Runs all checks, from the hardware up to the job's environment."""
    node, connection = _connect(session)
    simulated = node is not None and node.simulated is not None
    if not simulated:
        for check in machine_checks.hardware_checks():
            if node is not None and node.gpus and check.state == "fault":
                # Only zeusd needs them; this process may be in a container without them.
                sentence = f"{check.found} as seen from here, but zeusd has its GPUs"
                yield note(check.name, sentence)
            else:
                yield check
    yield connection
    yield from _package()
    yield from _groups(node)
    yield from _systemd(simulated)
    yield from _configuration(node)
    yield from _container(session, node)
    if node is not None:
        yield from of_node(session.client, node)
        yield _visible(node)
        if not simulated:
            yield from machine_checks.accounting_checks()
            yield from machine_checks.other_agents_check()
            yield from machine_checks.profiles_check()


def _package() -> Iterator[Check]:
    """Yields a fault if ml-energy/zeus is installed over the library."""
    spec = importlib.util.find_spec("zeus")
    folder = spec is not None and spec.origin is not None and os.path.dirname(spec.origin)
    problem = overlap(folder) if folder else None
    if problem is not None:
        what, _, remedy = problem.partition("; keep one: ")
        yield fault("package", what, f"keep one: {remedy}")


def _connect(session: Session) -> tuple[NodeInfo | None, Check]:
    path = session.socket
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(path)
        remedy = "start zeusd (`systemctl start zeusd`), or name its socket in $ZEUSD_SOCK_PATH"
        if not os.path.isdir(folder):
            remedy += f"; in a container mount the host's folder {folder}"
        return None, fault("socket", f"there is no {path}", remedy)
    except PermissionError:
        remedy = f"let this user enter {os.path.dirname(path)}"
        return None, fault("socket", f"{path} cannot be seen", remedy)
    if not stat.S_ISSOCK(mode):
        return None, fault(
            "socket",
            f"{path} is not a socket",
            "correct the path after --socket, or $ZEUSD_SOCK_PATH",
        )
    try:
        node = session.node
    except ZeusIpcError as error:
        problem, _, remedy = error.message.rpartition("; ")
        return None, fault("socket", problem, remedy)
    since = duration(seconds_since(node.started_ns))
    return node, ok("socket", f"{path} answers; zeusd {node.daemon_version} is up {since}")


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
            yield ok("group", f"this process is in group {name}")
        elif user in group.gr_mem:
            yield fault(
                "group",
                f"{user} was added to group {name} after this session began",
                f"log in again, or run `newgrp {name}`",
            )


def _systemd(simulated: bool) -> Iterator[Check]:
    if simulated or not Path(SYSTEMD).is_dir() or shutil.which("systemctl") is None:
        return
    for unit in UNITS:
        wanted = "--property=LoadState,ActiveState,UnitFileState"
        shown = output_of("systemctl", "show", unit, wanted)
        if shown is None:
            yield note("systemd", "systemctl does not answer", "see what `systemctl status` says")
            return
        state = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        if state.get("LoadState") != "loaded":
            remedy = "run scripts/install, unless zeusd is started by other means"
            yield note("systemd", f"{unit} is not installed", remedy)
            return
        if state.get("ActiveState") != "active":
            remedy = f"`systemctl start {unit}`; if it ends again, see `journalctl -u {unit}`"
            said = _last_error(unit)
            sentence = f"{unit} is {state.get('ActiveState')}" + (
                f"; it said: {said}" if said else ""
            )
            yield fault("systemd", sentence, remedy)
            return
    yield ok("systemd", "zeusd's units are active")


def _last_error(unit: str) -> str:
    """Returns the newest error in a unit's log; empty if there is none, or this user may not read
    it.
    """
    options = ("-p", "err", "-n", "1", "-o", "cat", "--no-pager", "-q")
    return " ".join((output_of("journalctl", "-u", unit, *options) or "").split())


def _configuration(node: NodeInfo | None) -> Iterator[Check]:
    """Checks the file that zeusd would read at its next start: someone may have broken it since the
    last.
    """
    in_force = [] if node is None else node.findings
    for sentence in in_force:
        yield note("config", sentence, "correct the rule in zeusd.toml, or delete it, and reload")
    path = Path(CONFIGURATION)
    if not path.exists() or (node is not None and node.simulated is not None):
        return
    if not os.access(path, os.R_OK):
        yield note("config", f"{path} cannot be read by this user", "ask as root")
        return
    from zeusd.config import ConfigError, load
    from zeusd.config_check import findings

    try:
        sentences = findings(load(str(path)), None if node is None else node.gpus or None)
    except ConfigError as error:
        text = str(error).replace("\n", "; ")
        yield fault("config", text, "correct it: zeusd would not start, or reload, with it")
        return
    for sentence in sentences:
        if sentence not in in_force:
            yield note("config", f"{path}: {sentence}", "correct the rule, or delete it")
    if not sentences:
        yield ok("config", f"{path} is valid")


def _container(session: Session, node: NodeInfo | None) -> Iterator[Check]:
    kind = machine_checks.container()
    if not kind:
        return
    path = os.path.abspath(session.socket)
    folder = os.path.dirname(path)
    mounted = machine_checks.mount_point_of(path)
    if mounted == path:
        yield fault(
            "container",
            f"{kind}: the socket file itself is mounted, and will not work after zeusd restarts",
            f"mount the folder {folder} instead",
        )
        return
    wrong = [] if node is None else list(_own_zeusd(session, node, shared=mounted == folder))
    yield from wrong or [ok("container", kind)]


def _own_zeusd(session: Session, node: NodeInfo, shared: bool) -> Iterator[Check]:
    """Checks a zeusd that runs in this container; yields nothing if it runs elsewhere."""
    zeusd = machine_checks.listener_of(session.socket)
    if zeusd is None:
        return
    if not machine_checks.in_host_pid_namespace():
        remedy = "start its container with --pid=host (Kubernetes: hostPID: true)"
        if shared:
            problem = (
                "zeusd is in this container's own pid namespace, and refuses all clients outside"
            )
            yield fault("container", problem, remedy)
        else:
            problem = "zeusd serves this container alone: it would not see processes outside"
            yield note(
                "container", problem, f"{remedy}, and share {os.path.dirname(session.socket)}"
            )
    if node.simulated is not None:
        return
    try:
        if not has_sys_admin(zeusd):
            problem = "zeusd has no CAP_SYS_ADMIN, so the driver refuses every change"
            yield fault("rights", problem, "start its container with --cap-add SYS_ADMIN")
        elif machine_checks.in_user_namespace(zeusd):
            problem = "zeusd is in a user namespace, so the driver refuses every change"
            yield fault("rights", problem, "start it as root, without --userns or userns-remap")
    except OSError:
        return  # it has just ended, which another line reports


def _visible(node: NodeInfo) -> Check:
    from zeus.device.visible import visible_gpus
    from zeus.exceptions import ZeusBaseError

    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = visible_gpus(node.gpus, os.environ, node.simulated is not None)
    except ZeusBaseError as error:
        return fault("visible", f"CUDA_VISIBLE_DEVICES={text}: {error}", "correct it")
    mapping = ", ".join(
        f"a program's GPU {number} is GPU {gpu.index} here" for number, gpu in enumerate(seen)
    )
    if text is None:
        sentence = "CUDA_VISIBLE_DEVICES is unset: programs see all GPUs"
        if len(seen) < len(node.gpus):
            sentence += f" that may be opened here: {mapping}"
        return ok("visible", sentence)
    if not seen:
        remedy = "name GPUs by index or UUID, each once"
        return fault("visible", f"with CUDA_VISIBLE_DEVICES={text} programs see no GPU", remedy)
    return ok("visible", f"CUDA_VISIBLE_DEVICES={text}: {mapping}")
