"""Finds problems in a valid configuration, such as rules that match nothing on this node."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from zeus_ipc.replies import GpuInfo
from zeusd.config import Config, group_exists
from zeusd.core.policy import CoreSettings


def findings(config: Config, gpus: Sequence[GpuInfo] | None) -> list[str]:
    """Yield one sentence for each setting that has no effect, or a different one than it says."""
    sentences = [*_unknown_names(config)]
    if gpus is not None:
        sentences += findings_on(config, gpus)
    return sentences


def settings(config: Config) -> CoreSettings:
    """The core's policy, with users and groups looked up, and the findings."""
    unknown = [*_unknown_names(config)]

    def of_node(gpus: Sequence[GpuInfo]) -> list[str]:
        return [*unknown, *(findings_on(config, gpus) if gpus else ())]

    return replace(config.settings(), findings=of_node)


def findings_on(config: Config, gpus: Sequence[GpuInfo]) -> list[str]:
    """The findings that depend on the node's GPUs; pure."""
    return [*_site_limits(config, gpus), *_allowed_gpus(config, gpus)]


def _site_limits(config: Config, gpus: Sequence[GpuInfo]) -> Iterable[str]:
    taken: set[str] = set()
    for number, rule in enumerate(config.gpu, start=1):
        name = f"[[gpu]] {number} (match = {rule.match!r})"
        matching = [gpu for gpu in gpus if _matches(rule.match, gpu)]
        mine = [gpu for gpu in matching if gpu.uuid not in taken]
        taken |= {gpu.uuid for gpu in matching}
        if not matching:
            names = ", ".join(sorted({repr(gpu.name) for gpu in gpus})) or "none"
            if rule.match.startswith("GPU-"):
                names = "listed with their UUIDs by `zeusctl gpus`"
            yield f"{name} matches no GPU of this node; its GPUs are {names}"
        elif not mine:
            yield f"{name} has no effect: an earlier rule applies to all GPUs that it matches"
        elif rule.power_limit_w is not None:
            yield from _outside(name, rule.power_limit_w, mine)


def _outside(name: str, limit_w: float, gpus: Sequence[GpuInfo]) -> Iterable[str]:
    for gpu in gpus:
        low, high = gpu.power_limit_min_mw, gpu.power_limit_max_mw
        if low is None or high is None:
            yield f"{name}: GPU {gpu.index} ({gpu.name}) has no power limit, so the rule is ignored"
        elif not low <= limit_w * 1000 <= high:
            nearest = low if limit_w * 1000 < low else high
            yield (
                f"{name}: power_limit_w = {limit_w:g} is outside {low / 1000:g} to "
                f"{high / 1000:g} W, which GPU {gpu.index} ({gpu.name}) accepts; zeusd uses "
                f"{nearest / 1000:g} W"
            )


def _allowed_gpus(config: Config, gpus: Sequence[GpuInfo]) -> Iterable[str]:
    for number, rule in enumerate(config.allow, start=1):
        for pattern in rule.gpus:
            if not any(_matches(pattern, gpu) or pattern == str(gpu.index) for gpu in gpus):
                yield f"[[allow]] {number}: gpus = {pattern!r} matches no GPU of this node"


def _unknown_names(config: Config) -> Iterable[str]:
    group = config.daemon.socket_group
    if group is not None and not group.isdecimal() and not group_exists(group):
        yield (
            f"[daemon] socket_group: there is no group {group} here, and zeusd does not start "
            f"unless systemd passes a socket; create it (groupadd --system {group})"
        )
    places: list[tuple[str, Sequence[str | int], Callable[[str], object], str]] = [
        ("[accounting] readers", config.accounting.readers, grp.getgrnam, "group"),
        ("[access] admin_users", config.access.admin_users, pwd.getpwnam, "user"),
        ("[access] admin_groups", config.admin_groups(), grp.getgrnam, "group"),
    ]
    for number, rule in enumerate(config.allow, start=1):
        places.append((f"[[allow]] {number}: users", rule.users, pwd.getpwnam, "user"))
        places.append((f"[[allow]] {number}: groups", rule.groups, grp.getgrnam, "group"))
    for place, names, look_up, kind in places:
        for name in names:
            if isinstance(name, str) and name != "*":
                try:
                    look_up(name)
                except KeyError:
                    yield f"{place}: there is no {kind} {name} here, so it matches nobody"


def _matches(pattern: str, gpu: GpuInfo) -> bool:
    return fnmatchcase(gpu.uuid, pattern) or fnmatchcase(gpu.name, pattern)
