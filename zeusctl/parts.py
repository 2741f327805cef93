"""Which GPU, or which part of one, a resource manager means: one answer for Slurm and Kubernetes.

A name counts if it can mean one GPU only: a UUID, a device file, a PCI address, or a number that is
both NVML's index and the device file's. What cannot be known has no answer, never a likely one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import GpuInfo

MIG = "MIG-"
"""How UUIDs of MIG devices begin."""

UUIDS = ("GPU-", MIG)
REPLICA = "::"
"""Before the number of a share of a GPU (time-slicing, MPS)."""


@dataclass(frozen=True, slots=True)
class GpuPart:
    """A part of a GPU.

    Attributes:
        weight: Its size beside other parts; 0: all of the GPU.
        parts: Of how many parts the GPU consists; 0: not known.
        instance: The GPU instance of a MIG device; None: it is none, or several.
    """

    gpu: str
    weight: int = 0
    parts: int = 0
    instance: int | None = None


class Devices:
    """The devices of a node by the names that resource managers have for them."""

    def __init__(self, gpus: Sequence[GpuInfo], split: Mapping[str, GpuPart] | None = None) -> None:
        self.gpus = gpus
        self._parts = {name.lower(): part for name, part in (split or {}).items()}
        for gpu in gpus:
            file = gpu.device_file.removeprefix("/dev/").lower()
            # AMD's plugin writes the domain with four digits, the drivers with eight.
            names = [gpu.uuid, file, gpu.pci_address, gpu.pci_address[4:]]
            if number_of(file) == gpu.index:
                names.append(str(gpu.index))
            self._parts |= {name.lower(): GpuPart(gpu.uuid) for name in names if name}
            # As GKE's plugin names MIG devices: by the GPU's file, and the instance's number.
            for part in (split or {}).values():
                if part.gpu == gpu.uuid and part.instance is not None:
                    self._parts[f"{file}/gi{part.instance}"] = part

    def find(self, device: str) -> GpuPart | None:
        """The GPU or part that a name means; None: it is not known."""
        name, _, share = device.partition(REPLICA)
        part = self._parts.get(name.lower().removeprefix("/dev/"))
        return replace(part, weight=1) if part is not None and share and not part.weight else part


def number_of(file: str) -> int | None:
    """The number of a device file, from 0: of `/dev/nvidia3`, and of `/dev/dri/renderD131`."""
    match = re.search(r"(renderD)?([0-9]+)$", file, re.IGNORECASE)
    return None if match is None else int(match[2]) - (128 if match[1] else 0)


def mig_devices(client: Client, gpus: Sequence[GpuInfo]) -> dict[str, GpuPart]:
    """Returns the present MIG devices of GPUs, by UUID."""
    split = [gpu.uuid for gpu in gpus if gpu.mig_enabled]
    processes = client.processes(split) if split else {}
    return {
        device.uuid: GpuPart(uuid, device.slices, device.of, device.gpu_instance)
        for uuid, listed in processes.items()
        for device in listed.mig_devices
    }


def together(parts: Iterable[GpuPart]) -> list[GpuPart]:
    """Returns one part for each GPU: several of one GPU are added up."""
    merged: dict[str, GpuPart] = {}
    for part in parts:
        known = merged.get(part.gpu)
        if known is not None:
            whole = not part.weight or not known.weight
            weight = 0 if whole else part.weight + known.weight
            part = GpuPart(part.gpu, weight, 0 if whole else max(part.parts, known.parts))
        merged[part.gpu] = part
    return list(merged.values())


@dataclass(frozen=True, slots=True)
class Holding:
    """A part of a GPU, and the job or pod that holds it.

    Attributes:
        kind: `job` or `pod`.
        control_group: The name by which control groups know the holder; empty: not known.
    """

    kind: str
    name: str
    part: GpuPart
    run: str = ""
    control_group: str = ""

    def allocate(self, client: Client, uid: int | None = None) -> None:
        """Tells zeusd; doing so twice is not an error."""
        client.allocate(
            self.part.gpu,
            self.name,
            kind=self.kind,
            run=self.run,
            uid=uid,
            weight=self.part.weight,
            parts=self.part.parts,
            control_group=self.control_group,
        )


class ManagedAllocations:
    """Keeps zeusd's allocations in step with what a resource manager says.

    Args:
        user: The user of a holder, by its name; None: not known.
    """

    def __init__(self, client: Client, user: Callable[[str], int | None] = lambda name: None):
        self._client = client
        self._user = user
        self.held: set[Holding] = set()

    def keep(self, wanted: set[Holding], again: bool = False) -> tuple[list[Holding], set[Holding]]:
        """Applies what has changed. Returns the new and the ended allocations.

        Args:
            again: Also allocate what is already held: zeusd may not know it.

        Raises:
            ZeusIpcError: zeusd did not answer, or this user is not an administrator.
        """
        ended = self.held - wanted
        for one in ended:
            self._client.deallocate(one.name, kind=one.kind, gpus=[one.part.gpu])
            self.held.discard(one)
        fresh = wanted if again else wanted - self.held
        begun = sorted(fresh, key=lambda one: (one.name, one.part.gpu))
        for one in begun:
            one.allocate(self._client, self._user(one.name))
            self.held.add(one)
        return begun, ended
