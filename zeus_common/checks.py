"""The checks of a zeusd that answers and of its GPUs, for `zeusctl doctor` and `zeus.show_env`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from zeus_common.text import (
    count,
    duration,
    energy,
    gpus_text,
    named,
    seconds_since,
    split,
    user_name,
    value_text,
)
from zeus_ipc import __version__
from zeus_ipc.errors import SeveralGpusFailed, ZeusIpcError

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import GpuInfo, GpuState, NodeInfo

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One check of `doctor`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    name: str
    state: str
    """ok, note (nothing is wrong, but worth knowing) or fault."""
    found: str
    remedy: str
    """What to do; empty if ok."""


def ok(name: str, finding: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name=name, state="ok", found=finding, remedy="")


def note(name: str, finding: str, remedy: str = "") -> Check:
    """A check that found something worth knowing."""
    return Check(name=name, state="note", found=finding, remedy=remedy)


def fault(name: str, finding: str, remedy: str) -> Check:
    """A check that found a fault."""
    return Check(name=name, state="fault", found=finding, remedy=remedy)


def of_node(client: Client, node: NodeInfo) -> Iterator[Check]:
    """Runs the checks of a zeusd that answers, and of its GPUs."""
    yield _version(node)
    index = {gpu.uuid: gpu.index for gpu in node.gpus}
    for problem in node.problems:
        since = duration(seconds_since(problem.since_ns))
        yield fault(
            problem.part, f"{named(problem.cause, index)}, for {since}", f"`{problem.command}`"
        )
    yield _gpus(node)
    checks: tuple[Callable[[Client, NodeInfo], Check], ...] = (
        _policy,
        _sampling,
        _users,
        _ledger,
        _pending,
        _site_limits,
    )
    for check in checks:
        try:
            yield check(client, node)
        except ZeusIpcError as error:
            name = check.__name__.strip("_")
            yield fault(name, error.message, "look at zeusd's log (`journalctl -u zeusd`)")


def _version(node: NodeInfo) -> Check:
    if node.daemon_version == __version__:
        return ok("version", f"zeusd and zeusctl are both {__version__}")
    return note(
        "version",
        f"zeusd is {node.daemon_version} and zeusctl {__version__}; both speak protocol "
        f"{node.protocol}",
        "use matching releases if something is missing",
    )


def _gpus(node: NodeInfo) -> Check:
    if node.quiesced_ns is not None:
        since = duration(seconds_since(node.quiesced_ns))
        return fault("GPUs", f"zeusd is quiesced, since {since}", "`zeusctl resume`")
    if not node.gpus:
        return fault(
            "GPUs",
            "zeusd sees no GPUs",
            "see the lines above",
        )
    finding = f"zeusd sees {count(len(node.gpus), 'GPU')}" + (
        ", simulated" if node.simulated else ""
    )
    known = {gpu.pci_address.lower()[4:] for gpu in node.gpus}
    lost = [] if node.simulated else sorted({*on_the_bus()} - known)
    if lost:
        remedy = f"`sudo dmesg | grep -iE 'xid|nvrm|{lost[0]}' | tail`; the GPU needs a reset"
        return fault("GPUs", f"{finding}, and not {', '.join(lost)} on the PCI bus", remedy)
    parts = [
        f"GPU {gpu.index}: {split(gpu.runtime_indices)}" for gpu in node.gpus if gpu.mig_enabled
    ]
    if parts:
        remedy = "limits and energy are those of the whole GPU, shared by its parts"
        return note("GPUs", f"{finding}; {', '.join(parts)}", remedy)
    return ok("GPUs", finding)


def _policy(client: Client, node: NodeInfo) -> Check:
    policy = client.policy()
    if policy.admin:
        return ok("policy", "you administer this node's GPUs")
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
        return ok("policy", "you may change " + "; ".join(parts))
    if not node.gpus:
        return note("policy", "there are no GPUs")
    return note("policy", "read-only for you", why.rpartition("; ")[2])


def _sampling(client: Client, node: NodeInfo) -> Check:
    if node.quiesced_ns is not None:
        return note("sampling", "paused while zeusd is quiesced")
    known = {source.source for source in client.metrics().sources}
    sampled = known - {problem.source for problem in node.problems}
    finding = f"{count(len(sampled), 'device')} sampled"
    for gpu in node.gpus:
        if gpu.uuid not in known and not gpu.has_sensor:
            finding += f"; GPU {gpu.index} ({gpu.name}) has no sensor of energy or power"
    return ok("sampling", finding) if sampled else note("sampling", finding)


def _users(client: Client, node: NodeInfo) -> Check:
    users = client.metrics().users
    limited = [user for user in users if user.limited]
    hostile = [user for user in users if user.faults or user.refused]
    if limited:
        names = ", ".join(user_name(user.uid) for user in limited)
        return note(
            "users",
            f"requests of {names} are rate-limited",
            "use fewer or slower clients, or raise [server] requests_per_second in zeusd.toml",
        )
    if hostile:
        reasons = [f"user {user_name(user.uid)} {user.reason}" for user in hostile]
        finding = f"connections were closed since zeusd started: {'; '.join(reasons)}"
        return note("users", finding, "zeusd's log has more, once a minute")
    return ok("users", "no user was refused or rate-limited")


def _ledger(client: Client, node: NodeInfo) -> Check:
    ledger = client.metrics().ledger
    if ledger is None:
        return note("ledger", "zeusd keeps no energy ledger")
    if any(problem.part == "ledger" for problem in node.problems):
        return note("ledger", "not in use, see the line above")
    if ledger.damaged:
        return note(
            "ledger",
            f"a damaged ledger was moved aside: {', '.join(ledger.damaged)}",
            "restore it from a copy, or delete it",
        )
    total_j = sum(ledger.counted_uj.values()) / 1e6
    held = len({one.gpu for one in ledger.held})
    return ok("ledger", f"{energy(total_j)} charged, {count(held, 'GPU')} allocated")


def _pending(client: Client, node: NodeInfo) -> Check:
    index = {gpu.uuid: gpu.index for gpu in node.gpus}
    waiting = [lease for lease in client.leases() if lease.trouble is not None]
    if not waiting:
        return ok("restores", "no restore is pending")
    first = waiting[0]
    target = value_text(first.control.value, first.back.value)
    trouble = named(first.trouble or "", index)
    since_s = seconds_since(first.pending_ns or time.monotonic_ns())
    missing = [one.gpu for one in waiting if index and one.gpu not in index]
    remedy = "when the GPU answers again, run `zeusctl reset` to restore at once"
    if missing:
        remedy = f"if the GPU was removed for good, `sudo zeusctl reset {missing[0]} --forget`"
    return fault(
        "restores",
        f"{count(len(waiting), 'control')} could not be restored; the first: {first.control.value} "
        f"of {named(first.gpu, index)} to {target}: {trouble} "
        f"(pending for {duration(since_s)})",
        f"zeusd keeps retrying; {remedy}",
    )


def _site_limits(client: Client, node: NodeInfo) -> Check:
    states, _ = read_states(client, node.gpus) if node.quiesced_ns is None else ({}, {})
    above = []
    for gpu in node.gpus:
        limit, site = getattr(states.get(gpu.uuid), "power_limit_mw", None), gpu.power_limit_site_mw
        if limit is not None and site is not None and limit > site:
            above.append(f"GPU {gpu.index} ({limit / 1000:g} W, site limit {site / 1000:g} W)")
    if not above:
        return ok("limits", "no GPU is above its site limit")
    return note(
        "limits",
        f"above the site limit: {', '.join(above)}",
        "`zeusctl reset all` lowers them now; `enforce = true` in zeusd.toml keeps them there",
    )


def each_of(
    ask: Callable[[Sequence[str]], Mapping[str, T]], uuids: Sequence[str]
) -> tuple[dict[str, T], dict[str, ZeusIpcError]]:
    """Asks about GPUs, and again without those that fail.

    Returns:
        Replies, and the errors of others; both by UUID.
    """
    answers: dict[str, T] = {}
    errors: dict[str, ZeusIpcError] = {}
    waiting = [*uuids]
    while waiting:
        # GPUs in one request.
        some = waiting[:16]
        failed: Mapping[str, ZeusIpcError] = {}
        try:
            answers |= ask(some)
        except SeveralGpusFailed as error:
            failed = error.errors
        except ZeusIpcError as error:
            if error.gpu is None:
                raise
            failed = {error.gpu: error}
        errors |= failed
        waiting = [uuid for uuid in waiting if uuid not in (failed or some)]
    return answers, errors


def read_states(
    client: Client, gpus: Sequence[GpuInfo]
) -> tuple[dict[str, GpuState], dict[str, str]]:
    """Returns the present state of GPUs, and why some could not be read; both by UUID."""
    states, failed = each_of(client.state, [gpu.uuid for gpu in gpus])
    errors = {uuid: error.message for uuid, error in failed.items()}
    for uuid, state in [*states.items()]:
        if state.failure is not None:
            del states[uuid]
            errors[uuid] = f"it does not answer any request: {state.failure}"
    return states, errors


def on_the_bus(root: str = "/") -> dict[str, int | None]:
    """The NVIDIA GPUs on the PCI bus, lost ones included: the numbers of their device files by
    address, such as `0000:07:00.0`; None where the driver has none.
    """
    devices: dict[str, int | None] = {}
    for device in Path(root, "sys/bus/pci/devices").glob("*"):
        driver = device / "driver"
        ours = not driver.exists() or driver.resolve().name == "nvidia"
        if ours and _read(device / "vendor") == "0x10de" and _read(device / "class")[:4] == "0x03":
            devices[device.name.lower()] = None
    for folder in Path(root, "proc/driver/nvidia/gpus").glob("*"):
        minor = re.search(r"^Device Minor:\s*([0-9]+)", _read(folder / "information"), re.MULTILINE)
        devices[folder.name.lower()] = None if minor is None else int(minor[1])
    return devices


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
