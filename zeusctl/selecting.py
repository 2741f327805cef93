"""Parses the GPUS argument: indices, ranges, UUIDs, PCI addresses, or all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeusctl.exits import CommandError, Exit

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

HELP = (
    "GPUS: indices as nvidia-smi counts (0,2 or 0-3), UUIDs, PCI addresses, all, or slurm (in a "
    "prolog or epilog: the job's)."
)


def select(text: str, gpus: Sequence[GpuInfo]) -> list[GpuInfo]:
    """Returns the GPUs that a text names, in the node's order, each once.

    Raises:
        CommandError: It names a GPU that does not exist, or none.
    """
    chosen: list[GpuInfo] = []
    for part in text.split(","):
        part = part.strip()
        found = _find(part, gpus)
        if not found:
            there = ", ".join(str(gpu.index) for gpu in gpus) or "none"
            raise CommandError(
                f"there is no GPU {part!r} here; name one of {there}, a range such as "
                "0-3, a UUID, or all",
                Exit.UNKNOWN,
                "unknown_gpu",
            )
        chosen += found
    return [gpu for gpu in gpus if gpu in chosen]


def _find(part: str, gpus: Sequence[GpuInfo]) -> list[GpuInfo]:
    if part == "all":
        return list(gpus)
    if part.isdecimal():
        return [gpu for gpu in gpus if gpu.index == int(part)]
    span = re.fullmatch(r"([0-9]+)-([0-9]+)", part)
    if span is not None:
        wanted = range(int(span[1]), int(span[2]) + 1)
        found = [gpu for gpu in gpus if gpu.index in wanted]
        return found if len(found) == len(wanted) else []
    if part.upper().startswith("GPU-"):
        matching = [gpu for gpu in gpus if gpu.uuid.lower().startswith(part.lower())]
        return matching if len(matching) == 1 else []
    at = [gpu for gpu in gpus if part and gpu.pci_address.lower().endswith(part.lower())]
    return at if len({gpu.pci_address for gpu in at}) == 1 else []
