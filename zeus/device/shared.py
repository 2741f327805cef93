"""GPUs that share controls: dies of a card share the power limit, partitions of a package
everything. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo


def owner(info: GpuInfo) -> str:
    """UUID of the GPU that reports this one's power limit."""
    return info.power_domain[0] if info.power_domain else info.uuid


def with_power_limit(infos: Sequence[GpuInfo], indices: Sequence[int], alone: bool) -> list[int]:
    """Selects one GPU for each power limit that a process sets."""
    uuids = [info.uuid for info in infos]

    def sets(index: int) -> bool:
        return owner(infos[index]) == uuids[index] and uuids.index(uuids[index]) == index

    chosen: dict[str, int] = {}
    for index in sorted(indices, key=lambda one: not sets(one)):
        if alone or sets(index):
            chosen.setdefault(owner(infos[index]), index)
    return sorted(chosen.values(), key=list(indices).index)


def covered(infos: Sequence[GpuInfo], indices: Sequence[int]) -> list[str]:
    """Describes what readings of partitions cover: a sentence for each GPU that has some."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        if len(infos[index].runtime_indices) > 1:
            groups.setdefault(infos[index].uuid, []).append(index)
    found = []
    for group in groups.values():
        info, several = infos[group[0]], "s" * (len(group) > 1)
        found.append(
            f"GPU{several} {', '.join(map(str, group))}: {len(group)} of the "
            f"{len(info.runtime_indices)} partitions of one {info.name}. Power and energy are "
            "those of the whole package, with what its other partitions draw; windows count its "
            f"energy once, at GPU {group[0]}."
        )
    return found


def not_enforced(info: GpuInfo, wanted: Sequence[int], requested: Sequence[int]) -> list[str]:
    """Names of the workload power profiles that are not enforced because of others."""
    offered = {one.profile: one for one in info.power_profiles}
    rivals = [offered[one] for one in requested if one in offered]
    return [
        offered[one].name
        for one in wanted
        if any(
            rival.profile in offered[one].conflicts and rival.priority < offered[one].priority
            for rival in rivals
        )
    ]
