"""Describes the power limit in force on some GPUs, and who set it, for the end of a search."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from zeus import _node
from zeus.device import GPUs
from zeus.exceptions import ZeusBaseError
from zeus.optimizer.power_limit.profile import watts
from zeus_ipc.circuit import bounded
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import LeaseInfo
from zeus_ipc.users import user_name


def describe(gpus: GPUs, indices: Sequence[int], highest_mw: int, last_mw: int) -> str:
    """Returns the rest of the sentence "training continues at ...". Never raises, and hardly waits.

    Args:
        gpus: The GPUs of this process.
        indices: Those to describe.
        highest_mw: The highest limit that this process may set.
        last_mw: The limit that it set last; 0: none.
    """
    limits: dict[int, int] = {}
    try:
        with bounded():
            for index in indices:
                limits[index] = gpus[index].get_power_management_limit()
    except ZeusBaseError:
        last = f"; {watts(last_mw)} W was set last" if last_mw else ""
        return f"a power limit that cannot be read now{last}"
    lowered = {index: limit for index, limit in limits.items() if limit != highest_mw}
    if not lowered:
        return "the highest limit"
    index, limit = next(iter(lowered.items()))
    where = f" on GPU {index}" if len(limits) > 1 else ""
    return f"{watts(limit)} W{where}, {_who(gpus, index)}"


def _who(gpus: GPUs, index: int) -> str:
    uuid = gpus[index].uuid
    leases: list[LeaseInfo] = []
    with contextlib.suppress(ZeusIpcError, ZeusBaseError), bounded():
        leases = _node.get_client().leases()
    for lease in leases:
        if lease.gpu == uuid and lease.control == "power_limit":
            if lease.restoring:
                return "which zeusd is restoring"
            if lease.pid == os.getpid():
                return "which this process has set"
            process = "a process" if lease.pid is None else f"process {lease.pid}"
            name = f" ({lease.command})" if lease.command else ""
            return f"which {process}{name} of user {user_name(lease.uid)} has set"
    return "which was set outside zeusd, or is its restore target"
