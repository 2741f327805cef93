"""Parses the specification of a simulated node: `4xv100-pcie`, `a100-sxm-80,a40:seed=3`."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeusd.devices.simulated.models import ALIASES, AMD, DEVICES, DeviceModel
from zeusd.devices.simulated.reported import read_report

DRIVER_VERSION = "595.58.03"
REPORT = "report:"
MIG_SLICES = 7
MIG_ARCHITECTURES = (7, 9, 10)
"""NVML's numbers of Ampere, Hopper and Blackwell."""
GPM_ARCHITECTURE = 9
"""First architecture whose driver measures the use of an instance."""

LACKS = frozenset({"counter", "power", "limit", "limited"})
"""An energy counter; any sensor of energy or power, as a display card; a limit to set, as a
laptop; counters of the time limited."""

_NAMESPACE = uuid.UUID("5a455553-4400-4000-8000-73696d756c61")


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One simulated GPU.

    Attributes:
        model: The product.
        index: Position on the node.
        seed: Seeds sensor phase, noise and latency.
        setter_ms: Mean time of a setter; 0: none. Hardware takes 10 to 20 ms.
        gain_sigma: Spread of the power sensor's gain between boards; real boards have about 0.03.
        unprivileged: Setters answer NO_PERMISSION.
        counts_all: The energy counter counts all of a tick, even what the power reading misses.
        driver_version: Version that the driver reports.
        die: Number of the GPU on its card; the first, 0, has the power limit and sensors.
        module: Number of its superchip, if it is part of one.
        partitions: Number of devices as which HIP shows it (AMD).
        mig: Slices of each MIG instance that it is split into (NVIDIA); empty: it is not.
        lacks: What it does not have, of `LACKS`.
    """

    model: DeviceModel
    index: int
    seed: int = 0
    setter_ms: float = 12.0
    gain_sigma: float = 0.0
    unprivileged: bool = False
    counts_all: bool = False
    driver_version: str = DRIVER_VERSION
    die: int = 0
    module: int | None = None
    partitions: int = 1
    mig: tuple[int, ...] = ()
    lacks: frozenset[str] = frozenset()

    @property
    def uuid(self) -> str:
        """The UUID, which depends on the node and the GPU's index only and survives restarts."""
        name = uuid.uuid5(_NAMESPACE, f"{self.index}:{self.model.key}:{self.seed}")
        return f"GPU-{name.hex[:16] if self.model.architecture == AMD else name}"

    @property
    def partitionable(self) -> bool:
        """Whether it can be partitioned: AMD's GPUs from MI300 on."""
        return self.model.architecture == AMD and self.model.dies == 1

    @property
    def pci_address(self) -> str:
        """Address on the simulated bus; rises with the index."""
        domain, slot = divmod(self.index, 31)
        return f"{domain:08X}:{7 + 8 * slot:02X}:00.0"


def parse_spec(text: str) -> tuple[GpuSpec, ...]:
    """The GPUs that a spec names.

    `[Nx]KIND[:option=value...]`, several of them separated by commas. Options: seed, setter_ms,
    gain_sigma, unprivileged, counts_all, lacks (such as `lacks=power+limit`), partitions (MI300 and
    later), mig (such as `mig=1g+2g`, at most 7 slices, A100 and later). `report:FILE` stands for
    the GPUs of a report of `zeusctl probe`.

    Raises:
        ValueError: It is not valid; the message says what is.
    """
    gpus: list[GpuSpec] = []
    for group in text.split(","):
        if group.strip().startswith(REPORT):
            _add(gpus, text, _reported(group.strip()[len(REPORT) :]))
            continue
        kind, *options = group.strip().split(":")
        match = re.fullmatch(r"(?:(\d+)x)?([a-z0-9-]+)", kind.strip().lower())
        key = ALIASES.get(match.group(2), match.group(2)) if match else ""
        if match is None or key not in DEVICES:
            raise ValueError(
                f"cannot simulate {kind.strip()!r}: write 4xv100-pcie or "
                f"a100-sxm-80,a40, of: {', '.join(sorted(DEVICES))}; or as report:FILE"
            )
        count = int(match.group(1) or 1)
        model = DEVICES[key]
        first = _apply_options(GpuSpec(model, index=0), group, options)
        if count % model.per_card:
            raise ValueError(
                f"cannot simulate {kind.strip()!r}: a card of {model.name} is {model.per_card} "
                f"GPUs; name {count + 1}x{model.key}"
            )
        modules = len({spec.module for spec in gpus} - {None})
        more = []
        for number in range(count):
            module = None if model.superchip is None else modules + number // model.per_card
            more.append(replace(first, die=number % model.dies, module=module))
        _add(gpus, text, more)
    return tuple(gpus)


def _add(gpus: list[GpuSpec], text: str, more: Sequence[GpuSpec]) -> None:
    if not 1 <= len(more) <= 64 - len(gpus):
        raise ValueError(f"cannot simulate {text!r}: a node has 1 to 64 GPUs")
    for spec in more:
        gpus.append(replace(spec, index=len(gpus)))


def _reported(path: str) -> list[GpuSpec]:
    return [
        GpuSpec(one.model, 0, counts_all=one.counts_all, driver_version=one.driver_version)
        for one in read_report(path)
    ]


def _apply_options(spec: GpuSpec, group: str, options: list[str]) -> GpuSpec:
    for option in options:
        name, _, value = option.partition("=")
        try:
            if name == "seed":
                spec = replace(spec, seed=int(value))
            elif name == "setter_ms" and float(value) >= 0:
                spec = replace(spec, setter_ms=float(value))
            elif name == "gain_sigma" and float(value) >= 0:
                spec = replace(spec, gain_sigma=float(value))
            elif option == "unprivileged":
                spec = replace(spec, unprivileged=True)
            elif option == "counts_all":
                spec = replace(spec, counts_all=True)
            elif name == "lacks" and LACKS.issuperset(value.split("+")):
                spec = replace(spec, lacks=frozenset(value.split("+")))
            elif name == "partitions" and spec.partitionable and 1 <= int(value) <= 8:
                spec = replace(spec, partitions=int(value))
            elif name == "mig" and spec.model.architecture in MIG_ARCHITECTURES:
                slices = tuple(int(one.removesuffix("g")) for one in value.split("+"))
                if min(slices) < 1 or sum(slices) > MIG_SLICES:
                    raise ValueError
                spec = replace(spec, mig=slices)
            else:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"cannot simulate {group.strip()!r}: the option {option!r} is not one of seed=N, "
                "setter_ms=MS, gain_sigma=SHARE, unprivileged, counts_all, lacks=power, counter, "
                "limit or limited, partitions=1 to 8 on AMD's MI300, and mig=1g+2g (at most 7 "
                "slices) on NVIDIA's A100 and later"
            ) from None
    return spec
