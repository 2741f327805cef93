"""Asks zeusd for what zeusctl shows, and joins the replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zeus_common.checks import each_of, read_states
from zeus_common.text import named, quantity_text
from zeusctl.entities import Ceiling, Gpu, Lease, Module, Process

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import GpuInfo, GpuState


def gpu_reports(client: Client, gpus: Sequence[GpuInfo], leases: Sequence[Lease]) -> list[Gpu]:
    """Reads GPUs."""
    return reports_of(gpus, *read_states(client, gpus), leases)


def reports_of(
    gpus: Sequence[GpuInfo],
    states: Mapping[str, GpuState],
    errors: Mapping[str, str],
    leases: Sequence[Lease] = (),
    processes: Sequence[Process] | None = None,
) -> list[Gpu]:
    """Converts the states of GPUs, and counts their leases and processes."""
    indices = {gpu.uuid: gpu.index for gpu in gpus}
    return [
        Gpu.of(
            gpu,
            states.get(gpu.uuid),
            error=named(errors[gpu.uuid], indices).removeprefix(f"GPU {gpu.index} ")
            if gpu.uuid in errors
            else None,
            leases=sum(lease.uuid == gpu.uuid for lease in leases),
            processes=None
            if processes is None
            else sum(process.uuid == gpu.uuid for process in processes),
        )
        for gpu in gpus
    ]


def module_reports(gpus: Sequence[GpuInfo], states: Mapping[str, GpuState]) -> list[Module]:
    """Returns the superchips of these GPUs. All GPUs of a module report its power: use the mean."""
    modules = []
    for module in sorted({gpu.module for gpu in gpus if gpu.module is not None}):
        members = [gpu for gpu in gpus if gpu.module == module]
        seen = [states[gpu.uuid] for gpu in members if gpu.uuid in states]
        powers = [one.module_power_mw for one in seen if one.module_power_mw is not None]
        own = [one.power_mw for one in seen if one.power_mw is not None]
        power_w = round(sum(powers) / len(powers) / 1000, 3) if powers else None
        gpu_power_w = sum(own) / 1000 if len(own) == len(members) else None
        modules.append(
            Module(
                module=module,
                gpus=[gpu.index for gpu in members],
                power_w=power_w,
                gpu_power_w=gpu_power_w,
                rest_w=None if power_w is None or gpu_power_w is None else power_w - gpu_power_w,
            )
        )
    return modules


def process_reports(
    client: Client, gpus: Sequence[GpuInfo], leases: Sequence[Lease]
) -> tuple[list[Process], list[str]]:
    """Returns the processes of GPUs, in their order, with their leases; and why those of others
    cannot be listed."""
    listed, failed = each_of(client.processes, [gpu.uuid for gpu in gpus])
    indices = {gpu.uuid: gpu.index for gpu in gpus}
    return [
        Process.of(one, gpu=gpu.index, uuid=gpu.uuid, leases=_held_by(one.pid, gpu.uuid, leases))
        for gpu in gpus
        if gpu.uuid in listed
        for one in listed[gpu.uuid].processes
    ], [named(error.message, indices) for error in failed.values()]


def _held_by(pid: int | None, uuid: str, leases: Sequence[Lease]) -> list[str]:
    family = _family(pid) if pid is not None else ()
    return [
        f"{lease.control} {quantity_text(lease.control, lease.value)}"
        + ("" if lease.pid == pid else f" (pid {lease.pid})")
        for lease in leases
        if lease.uuid == uuid and lease.pid in family
    ]


def _family(pid: int) -> list[int]:
    """A process and its ancestors, as far as they are visible from here: a command runs under the
    lease of `zeusctl set`."""
    pids: list[int] = []
    while pid > 1 and pid not in pids:
        pids.append(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return pids


def lease_reports(client: Client, gpus: Sequence[GpuInfo], *, others: bool = False) -> list[Lease]:
    """Returns the leases on these GPUs, in their order; first those on others, if wanted."""
    indices = {gpu.uuid: gpu.index for gpu in gpus}
    leases = [
        Lease.of(
            one,
            gpu=indices.get(one.gpu, -1),
            trouble=None if one.trouble is None else named(one.trouble, indices),
        )
        for one in client.leases()
        if others or one.gpu in indices
    ]
    return sorted(leases, key=lambda lease: lease.gpu)


def ceiling_reports(gpus: Sequence[GpuInfo]) -> list[Ceiling]:
    """The ceilings of these GPUs, in their order; `Gpu.persisted` reports a persistent limit."""
    return [
        Ceiling.of(ceiling, gpu=gpu.index, uuid=gpu.uuid)
        for gpu in gpus
        for ceiling in gpu.ceilings
        if ceiling.name != "persisted"
    ]
