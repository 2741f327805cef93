"""The part of a GPU that a scheduler's device stands for: all of it, a share, or a MIG device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import GpuInfo

MIG = "MIG-"
"""How UUIDs of MIG devices begin."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a GPU.

    Attributes:
        gpu: Its UUID.
        weight: Its size beside other parts; 0: all of the GPU.
        parts: Of how many parts the GPU consists; 0: not known.
        instance: The GPU instance of a MIG device; None: it is none, or several.
    """

    gpu: str
    weight: int = 0
    parts: int = 0
    instance: int | None = None


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
