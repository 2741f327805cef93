"""Processes that share a simulated GPU, as the driver lists and measures them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.port import GpuProcess, MigInstance, ProcessUse
from zeusd.devices.simulated.spec import GPM_ARCHITECTURE, MIG_SLICES, GpuSpec

SAMPLE_US = 166_667
"""Period at which the driver samples each process."""


class Tenant(NamedTuple):
    """One of several processes that share a GPU's work.

    Attributes:
        pid: The process.
        sm_percent: Share of the GPU, or of its MIG instance, that it uses while there is work.
        gpu_instance: The MIG instance that it runs on, from 1 on.
    """

    pid: int
    sm_percent: int = 0
    gpu_instance: int | None = None


def processes(tenants: Sequence[Tenant], memory_bytes: int) -> list[GpuProcess]:
    """The processes that have a context on the GPU."""
    memory = memory_bytes // max(1, len(tenants))
    return [
        GpuProcess(
            tenant.pid,
            memory,
            True,
            tenant.gpu_instance,
            None if tenant.gpu_instance is None else 0,
        )
        for tenant in sorted(tenants)
    ]


def process_uses(
    spec: GpuSpec, tenants: Sequence[Tenant], busy: bool, since_us: int, now_us: int
) -> list[ProcessUse]:
    """The newest sample of each process that used the GPU since a time."""
    if spec.mig:
        raise nvml_error(Return.NOT_SUPPORTED, "nvmlDeviceGetProcessUtilization")
    uses = []
    for tenant in tenants:
        t_us = now_us - (now_us + 37_000 * tenant.pid) % SAMPLE_US
        if busy and tenant.sm_percent and t_us > since_us:
            uses.append(ProcessUse(tenant.pid, t_us, tenant.sm_percent))
    return uses


def mig_instances(
    spec: GpuSpec, tenants: Sequence[Tenant], busy: bool, measure: bool
) -> list[MigInstance]:
    """The MIG instances of a GPU, each with one compute instance."""
    instances = []
    for number, slices in enumerate(spec.mig, 1):
        used = sum(tenant.sm_percent for tenant in tenants if tenant.gpu_instance == number)
        measured = measure and spec.model.architecture >= GPM_ARCHITECTURE
        percent = float(min(100, used) if busy else 0) if measured else None
        name = f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, f'{spec.uuid}:{number}')}"
        instances.append(MigInstance(name, number, 0, slices, MIG_SLICES, percent))
    return instances
