"""Which GPU, or which part of one, a resource manager means: one answer for Slurm and Kubernetes.

A name counts if it can mean one GPU only: a UUID, a device file, a PCI address, or a number that is
both NVML's index and the device file's. What cannot be known has no answer, never a likely one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
class Part:
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

    def __init__(self, gpus: Sequence[GpuInfo], split: Mapping[str, Part] | None = None) -> None:
        self.gpus = gpus
        self._parts = {name.lower(): part for name, part in (split or {}).items()}
        for gpu in gpus:
            file = gpu.device_file.removeprefix("/dev/").lower()
            # AMD's plugin writes the domain with four digits, the drivers with eight.
            names = [gpu.uuid, file, gpu.pci_address, gpu.pci_address[4:]]
            if number_of(file) == gpu.index:
                names.append(str(gpu.index))
            self._parts |= {name.lower(): Part(gpu.uuid) for name in names if name}
            # As GKE's plugin names MIG devices: by the GPU's file, and the instance's number.
            for part in (split or {}).values():
                if part.gpu == gpu.uuid and part.instance is not None:
                    self._parts[f"{file}/gi{part.instance}"] = part

    def find(self, device: str) -> Part | None:
        """The GPU or part that a name means; None: it is not known."""
        name, _, share = device.partition(REPLICA)
        part = self._parts.get(name.lower().removeprefix("/dev/"))
        return replace(part, weight=1) if part is not None and share and not part.weight else part


def number_of(file: str) -> int | None:
    """The number of a device file, from 0: of `/dev/nvidia3`, and of `/dev/dri/renderD131`."""
    found = re.search(r"(renderD)?([0-9]+)$", file, re.IGNORECASE)
    return None if found is None else int(found[2]) - (128 if found[1] else 0)


def mig_devices(client: Client, gpus: Sequence[GpuInfo]) -> dict[str, Part]:
    """Returns the present MIG devices of GPUs, by UUID."""
    split = [gpu.uuid for gpu in gpus if gpu.mig_enabled]
    found = client.processes(split) if split else {}
    return {
        one.uuid: Part(uuid, one.slices, one.of, one.gpu_instance)
        for uuid, listed in found.items()
        for one in listed.mig_devices
    }


def together(parts: Iterable[Part]) -> list[Part]:
    """Returns one part for each GPU: several of one GPU are added up."""
    found: dict[str, Part] = {}
    for part in parts:
        known = found.get(part.gpu)
        if known is not None:
            whole = not part.weight or not known.weight
            weight = 0 if whole else part.weight + known.weight
            part = Part(part.gpu, weight, 0 if whole else max(part.parts, known.parts))
        found[part.gpu] = part
    return list(found.values())
