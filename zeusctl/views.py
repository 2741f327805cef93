"""Converts zeusd's replies to reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zeus_ipc.client import Client
from zeus_ipc.controls import SPECS, Control, profile_name
from zeus_ipc.errors import SeveralGpusFailed, ZeusIpcError
from zeus_ipc.replies import GpuInfo, GpuState, LeaseInfo, NodeInfo, Permission, ProcessInfo
from zeus_ipc.users import named
from zeusctl.reports import (
    Ceiling,
    Gpu,
    Held,
    KnownGpu,
    Lease,
    Module,
    Node,
    Permitted,
    PowerLimit,
    Problem,
    Process,
    Value,
)
from zeusctl.session import seconds_since
from zeusctl.text import quantity_text, reasons, user_name

_LISTED = 16
"""GPUs in one request."""

_NO_STATE = GpuState(
    t_ns=0,
    power_limit_mw=None,
    enforced_power_limit_mw=None,
    gpu_clock_mhz=None,
    memory_clock_mhz=None,
    locked_gpu_clocks_mhz=None,
    locked_memory_clocks_mhz=None,
    persistence_mode=None,
    power_mw=None,
    energy_mj=None,
    temperature_c=None,
    throttle_reasons=None,
)


def read_states(
    client: Client, gpus: Sequence[GpuInfo]
) -> tuple[dict[str, GpuState], dict[str, str]]:
    """Returns the present state of GPUs, and why some could not be read; both by UUID. For a GPU
    that the driver has lost, zeusd's reply is empty.
    """
    states: dict[str, GpuState] = {}
    errors: dict[str, str] = {}
    for first in range(0, len(gpus), _LISTED):
        uuids = [gpu.uuid for gpu in gpus[first : first + _LISTED]]
        failed: Mapping[str, ZeusIpcError] = {}
        try:
            states |= client.state(uuids)
        except SeveralGpusFailed as error:
            failed = error.errors
        except ZeusIpcError as error:
            if error.gpu is None:
                raise
            failed = {error.gpu: error}
        errors |= {uuid: error.message for uuid, error in failed.items()}
        # Ask again for those that could be read, without the others.
        left = [uuid for uuid in uuids if uuid not in states and uuid not in failed]
        if left:
            states |= client.state(left)
    for uuid in [uuid for uuid, state in states.items() if not _answers(state)]:
        del states[uuid]
        errors[uuid] = "it does not answer any request; see nvidia-smi and the kernel log"
    return states, errors


def _answers(state: GpuState) -> bool:
    readings = (state.power_mw, state.power_limit_mw, state.temperature_c, state.gpu_clock_mhz)
    return any(reading is not None for reading in readings)


def gpu_reports(client: Client, gpus: Sequence[GpuInfo], leases: Sequence[Lease]) -> list[Gpu]:
    """Reads GPUs."""
    return reports_of(gpus, *read_states(client, gpus), leases)


def reports_of(
    gpus: Sequence[GpuInfo],
    states: Mapping[str, GpuState],
    errors: Mapping[str, str],
    leases: Sequence[Lease],
    processes: Sequence[Process] | None = None,
) -> list[Gpu]:
    """Converts the states of GPUs, and counts their leases and processes."""
    indices = {gpu.uuid: gpu.index for gpu in gpus}
    errors = {uuid: named(text, indices) for uuid, text in errors.items()}
    return [
        gpu_report(
            gpu,
            states.get(gpu.uuid, _NO_STATE),
            errors.get(gpu.uuid),
            sum(one.uuid == gpu.uuid for one in leases),
            None if processes is None else sum(one.uuid == gpu.uuid for one in processes),
        )
        for gpu in gpus
    ]


def gpu_report(
    gpu: GpuInfo, state: GpuState, error: str | None, leases: int, processes: int | None
) -> Gpu:
    """Converts the state of one GPU."""
    bits = state.throttle_reasons
    return Gpu(
        index=gpu.index,
        uuid=gpu.uuid,
        pci_address=gpu.pci_address,
        name=gpu.name,
        error=error,
        power_limit_w=power_limit(gpu, state),
        power_w=_thousandth(state.power_mw),
        energy_j=_thousandth(state.energy_mj),
        temperature_c=state.temperature_c,
        gpu_clock_mhz=state.gpu_clock_mhz,
        memory_clock_mhz=state.memory_clock_mhz,
        locked_gpu_clocks_mhz=_pair(state.locked_gpu_clocks_mhz),
        locked_memory_clocks_mhz=_pair(state.locked_memory_clocks_mhz),
        persistence_mode=state.persistence_mode,
        throttle_reasons=None if bits is None else reasons(bits),
        persisted=gpu.persisted,
        controls=[
            Held(
                control=name,
                value=quantity(name, value),
                unit=SPECS[Control(name)].unit,
            )
            for name, value in state.controls.items()
        ],
        utilization_percent=state.utilization_percent,
        memory_used_mib=state.memory_used_mib,
        memory_total_mib=gpu.memory_mib,
        enforced_power_profiles=None
        if state.enforced_power_profiles is None
        else [profile_name(one) for one in state.enforced_power_profiles],
        memory_power_w=_thousandth(state.memory_power_mw),
        module=gpu.module,
        power_of=next((one for one in gpu.power_domain[:1] if one != gpu.uuid), None),
        energy_scope=state.energy_scope,
        leases=leases,
        processes=processes,
    )


def module_reports(gpus: Sequence[GpuInfo], states: Mapping[str, GpuState]) -> list[Module]:
    """Returns the superchips of these GPUs. All GPUs of a module report its power: use the mean."""
    found = []
    for module in sorted({gpu.module for gpu in gpus if gpu.module is not None}):
        members = [gpu for gpu in gpus if gpu.module == module]
        seen = [states.get(gpu.uuid, _NO_STATE) for gpu in members]
        powers = [one.module_power_mw for one in seen if one.module_power_mw is not None]
        own = [one.power_mw for one in seen if one.power_mw is not None]
        found.append(
            Module(
                module=module,
                gpus=[gpu.index for gpu in members],
                power_w=round(sum(powers) / len(powers) / 1000, 3) if powers else None,
                gpu_power_w=sum(own) / 1000 if len(own) == len(seen) else None,
            )
        )
    return found


def quantity(control: str, value: Sequence[int] | None) -> Value | None:
    """Converts a control's value from the protocol's form to its unit."""
    return None if value is None else known_quantity(control, value)


def known_quantity(control: str, value: Sequence[int]) -> Value:
    """The same for a value that is not None."""
    spec = SPECS[Control(control)]
    if spec.shape == "switch":
        return bool(value[0])
    if spec.shape == "set":
        return [spec.member(part) for part in value]
    numbers = [part / spec.scale for part in value]
    return numbers if spec.shape == "range" else numbers[0]


def _processes(client: Client, uuids: Sequence[str]) -> dict[str, list[ProcessInfo]]:
    """Returns processes by UUID, of the GPUs that can be read."""
    found: dict[str, list[ProcessInfo]] = {}
    for first in range(0, len(uuids), _LISTED):
        some = uuids[first : first + _LISTED]
        try:
            answers = client.processes(some)
        except (SeveralGpusFailed, ZeusIpcError) as error:
            failed = set(getattr(error, "errors", ())) or {error.gpu}
            left = [uuid for uuid in some if uuid not in failed]
            if error.gpu is None and not getattr(error, "errors", ()):
                raise
            answers = client.processes(left) if left else {}
        found |= {uuid: answer.processes for uuid, answer in answers.items()}
    return found


def process_reports(
    client: Client, gpus: Sequence[GpuInfo], leases: Sequence[Lease]
) -> list[Process]:
    """Returns the processes of GPUs, in their order, with their leases. GPUs that do not answer
    have none.
    """
    found = []
    listed = _processes(client, [gpu.uuid for gpu in gpus])
    for gpu in gpus:
        for one in listed.get(gpu.uuid, ()):
            family = _family(one.pid) if one.pid is not None else ()
            held = [
                f"{lease.control} {quantity_text(lease.control, lease.value)}"
                + ("" if lease.pid == one.pid else f" (pid {lease.pid})")
                for lease in leases
                if lease.uuid == gpu.uuid and lease.pid in family
            ]
            found.append(
                Process(
                    gpu=gpu.index,
                    uuid=gpu.uuid,
                    pid=one.pid,
                    user=None if one.uid is None else user_name(one.uid),
                    command=one.command,
                    job=one.job,
                    type="C" if one.compute else "G",
                    memory_mib=one.memory_mib,
                    gpu_instance=one.gpu_instance,
                    leases=held,
                )
            )
    return found


def _family(pid: int) -> list[int]:
    """A process and its ancestors, as far as they are visible from here: a command runs under the
    lease of `zeusctl set`."""
    found: list[int] = []
    while pid > 1 and pid not in found:
        found.append(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def power_limit(gpu: GpuInfo, state: GpuState = _NO_STATE) -> PowerLimit:
    """Returns the power limits of a GPU; without its state, only the constant ones."""
    return PowerLimit(
        requested=_thousandth(state.power_limit_mw),
        enforced=_thousandth(state.enforced_power_limit_mw),
        site=_thousandth(gpu.power_limit_site_mw),
        highest=_thousandth(gpu.power_limit_highest_mw),
        site_enforced=gpu.power_limit_enforced,
        smallest=_thousandth(gpu.power_limit_min_mw),
        largest=_thousandth(gpu.power_limit_max_mw),
        default=_thousandth(gpu.power_limit_default_mw),
    )


def known_report(gpu: GpuInfo) -> KnownGpu:
    """Returns the constant properties of a GPU."""
    return KnownGpu(
        index=gpu.index,
        uuid=gpu.uuid,
        pci_address=gpu.pci_address,
        name=gpu.name,
        architecture=gpu.architecture,
        memory_mib=gpu.memory_mib,
        mig_enabled=gpu.mig_enabled,
        runtime_indices=gpu.runtime_indices,
        controls=gpu.controls,
        power_limit_w=power_limit(gpu),
        power_profiles=[one.name for one in gpu.power_profiles],
    )


def lease_report(lease: LeaseInfo, indices: Mapping[str, int]) -> Lease:
    """Converts a lease; adds the GPU's index."""
    control = lease.control.value
    target = known_quantity(control, lease.back.value)
    return Lease(
        gpu=indices.get(lease.gpu, -1),
        uuid=lease.gpu,
        control=control,
        value=quantity(control, lease.value),
        unit=SPECS[lease.control].unit,
        asked=quantity(control, lease.asked),
        uid=lease.uid,
        user=user_name(lease.uid),
        pid=lease.pid,
        command=lease.command,
        job=lease.job,
        held_s=round(seconds_since(lease.since_ns), 3),
        expires_in_s=round(max(0.0, (lease.expires_ns - time.monotonic_ns()) / 1e9), 3),
        restore_target=target,
        restore_target_source=lease.back.source,
        restoring=lease.restoring,
        trouble=None if lease.trouble is None else named(lease.trouble, indices),
        pending_s=None if lease.pending_ns is None else round(seconds_since(lease.pending_ns), 3),
    )


def lease_reports(client: Client, gpus: Sequence[GpuInfo], *, others: bool = False) -> list[Lease]:
    """Returns the leases on these GPUs, in their order; first those on others, if wanted."""
    indices = {gpu.uuid: gpu.index for gpu in gpus}
    leases = [lease_report(one, indices) for one in client.leases() if others or one.gpu in indices]
    return sorted(leases, key=lambda lease: lease.gpu)


def ceiling_reports(gpus: Sequence[GpuInfo]) -> list[Ceiling]:
    """The ceilings of these GPUs, in their order; `Gpu.persisted` reports a persistent limit."""
    return [
        Ceiling(
            gpu=gpu.index,
            uuid=gpu.uuid,
            name=one.name,
            control=one.control,
            value=one.value[0] / SPECS[Control(one.control)].scale,
            unit=SPECS[Control(one.control)].unit,
            uid=one.uid,
            user=user_name(one.uid),
            expires_in_s=None
            if one.deadline_ns is None
            else round(max(0.0, (one.deadline_ns - time.monotonic_ns()) / 1e9), 3),
            then=None
            if one.fallback is None
            else one.fallback[0] / SPECS[Control(one.control)].scale,
        )
        for gpu in gpus
        for one in gpu.ceilings
        if one.name != "persisted"
    ]


def node_report(node: NodeInfo, socket: str, leases: Sequence[Lease]) -> Node:
    """The daemon and its node."""
    pending = sum(lease.restoring for lease in leases)
    return Node(
        socket=socket,
        daemon_version=node.daemon_version,
        protocol=node.protocol,
        driver_version=node.driver_version,
        uptime_s=round(seconds_since(node.started_ns), 3),
        simulated=node.simulated is not None,
        quiesced_s=None if node.quiesced_ns is None else round(seconds_since(node.quiesced_ns), 3),
        gpus=len(node.gpus),
        leases=sum(not lease.restoring for lease in leases),
        pending_restores=pending,
        findings=node.findings,
        unusable=node.unusable,
        problems=[
            Problem(
                part=one.part,
                code=one.code,
                cause=one.cause,
                since_s=round(seconds_since(one.since_ns), 3),
                command=one.command,
            )
            for one in node.problems
        ],
    )


def permitted_report(
    control: str, permission: Permission, readable: Callable[[str], str]
) -> Permitted:
    """Converts a user's permission for a control."""
    factor = SPECS[Control(control)].scale
    return Permitted(
        control=control,
        allowed=permission.allowed,
        why=readable(permission.why),
        ranges=[(low / factor, high / factor) for low, high in permission.ranges],
    )


def _pair(values: Sequence[int] | None) -> tuple[int, int] | None:
    return None if values is None else (values[0], values[1])


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
