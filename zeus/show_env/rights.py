"""The section of `zeus.show_env` on what this user may change."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from zeus.show_env.daemon import Zeusd
from zeus.show_env.packages import Row
from zeus_ipc.processes import has_sys_admin
from zeus_ipc.users import group_name, user_name

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo, NodeInfo


def rows(gpus: list[GpuInfo], zeusd: Zeusd) -> list[Row]:
    """The whole section."""
    return [*user(), capability(zeusd), *may_set(gpus, zeusd), *controls(gpus, zeusd)]


def user() -> list[Row]:
    """The user and groups."""
    groups = [f"{group_name(gid)} ({gid})" for gid in sorted({os.getegid(), *os.getgroups()})]
    return [
        ("user", f"{user_name(os.geteuid())} (uid {os.geteuid()})"),
        ("groups", ", ".join(groups)),
    ]


def capability(zeusd: Zeusd) -> Row:
    """Whether the driver allows this process to change settings."""
    name = "CAP_SYS_ADMIN"
    try:
        effective = has_sys_admin()
    except OSError:
        return name, "not known: /proc is not mounted here"
    if effective:
        return name, "effective: the driver lets this process set limits and clocks"
    hint = "zeusd does it for you" if zeusd.info is not None else "run zeusd to do it for you"
    return name, f"not effective: the driver refuses to set limits and clocks; {hint}"


def may_set(gpus: list[GpuInfo], zeusd: Zeusd) -> list[Row]:
    """Whether this user may set each GPU's power limit, and the reason."""
    return [(f"may I set limits on NVML {gpu.index}", answer(gpu, zeusd)) for gpu in gpus]


def answer(gpu: GpuInfo, zeusd: Zeusd) -> str:
    """Yes or no, and the reason."""
    if not gpu.supports.power_limit:
        return f"no, because {gpu.name} offers none"
    if zeusd.info is None:
        privileged = False
        if zeusd.wanted:
            return f"no, because zeusd does not respond: {zeusd.problem}"
        with contextlib.suppress(OSError):
            privileged = has_sys_admin()
        if privileged:
            return "yes, because this process has CAP_SYS_ADMIN and no zeusd runs"
        return (
            "no, because no zeusd runs, and setting limits in this process needs root or "
            "CAP_SYS_ADMIN"
        )
    found = None if zeusd.policy is None else zeusd.policy.gpus.get(gpu.uuid, {}).get("power_limit")
    if found is None:
        return "not known: this zeusd does not report it; update it"
    if not found.allowed:
        return f"no, because {found.why}"
    ranges = " or ".join(f"{low / 1000:g} to {high / 1000:g} W" for low, high in found.ranges)
    return f"yes, because zeusd lets you{f' set {ranges}' if ranges else ''}"


def controls(gpus: list[GpuInfo], zeusd: Zeusd) -> list[Row]:
    """The controls of each GPU, and the holders of leases."""
    from zeus_ipc.controls import Control

    rows: list[Row] = []
    for gpu in gpus:
        offered = [one.value for one in Control if one.value in gpu.controls]
        rows.append((f"NVML {gpu.index} offers", ", ".join(offered) or "nothing to set"))
    if zeusd.info is None:
        return rows
    rows.append(("leasable", _leasable(zeusd.info)))
    if zeusd.leases_problem:
        return [*rows, ("leases", f"not known: {zeusd.leases_problem}")]
    number = {gpu.uuid: gpu.index for gpu in gpus}
    for one in zeusd.leases:
        holder = f"user {user_name(one.uid)}" + (f", pid {one.pid}" if one.pid else "")
        where = f"NVML {number.get(one.gpu, one.gpu)}"
        rows.append(("leased", f"{one.control.value} of {where} by {holder}"))
    return rows if zeusd.leases else [*rows, ("leased", "nothing at the moment")]


def _leasable(info: NodeInfo) -> str:
    if info.simulated is not None:
        return "everything, as the GPUs are simulated, unless zeusd.toml has rules"
    if os.geteuid() == 0:
        return "everything, as root, unless zeusd.toml forbids it or this is a container"
    return (
        "what the [[allow]] rules of zeusd.toml allow, or else what lowers power if you are in "
        "the group zeus; zeusd reports it on request"
    )
