"""Notices what others do to a GPU by its effect, where no setting shows it: a power limit in force
below the requested one, and clocks above those that zeusd locked.
"""

from __future__ import annotations

from collections.abc import Callable

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.limited import BMC
from zeusd.core.node import NodeState

LASTS_NS = 3_000_000_000
"""How long it lasts before it is recorded: what zeusd has set may take effect late."""

SHARE, MHZ = 1.03, 30
"""How far above its range a clock may be."""


class OutsideWatch:
    """Looks at what the sampler reads, once a second. Belongs to the sampler's thread.

    Args:
        node: What zeusd itself has set.
        post: Calls a function on the thread of the core.
    """

    def __init__(self, node: NodeState, post: Callable[[Callable[[], None]], object]) -> None:
        self._node = node
        self._post = post
        self._lowered: dict[str, tuple[int, int | None]] = {}  # since when; what is recorded
        self._above_ns: dict[tuple[str, Control], int] = {}

    def limits(
        self, uuid: str, t_ns: int, limit_mw: int | None, enforced_mw: int | None
    ) -> str | None:
        """Returns who set the power limit in force (`bounds.author`); records the beginning and
        the end of a limit below the requested one."""
        author = self._node.limit_author(uuid, limit_mw, enforced_mw)
        since_ns, noted_mw = self._lowered.pop(uuid, (t_ns, None))
        if author == BMC and limit_mw is not None and enforced_mw is not None:
            if noted_mw is None and t_ns - since_ns >= LASTS_NS:
                noted_mw = enforced_mw
                self._note(uuid, Control.POWER_LIMIT, limit_mw, enforced_mw, "enforced")
            self._lowered[uuid] = since_ns, noted_mw
        elif noted_mw is not None and enforced_mw is not None:
            self._note(uuid, Control.POWER_LIMIT, noted_mw, enforced_mw, "enforced")
        return author

    def clocks(self, uuid: str, t_ns: int, gpu_mhz: int | None, memory_mhz: int | None) -> None:
        """Records locked clocks that no longer hold, once until they do again."""
        gpu = self._node.gpus.get(uuid)
        for control, mhz in ((Control.GPU_CLOCKS, gpu_mhz), (Control.MEMORY_CLOCKS, memory_mhz)):
            machine = None if gpu is None else gpu.machines.get(control)
            locked: ControlValue = () if machine is None else machine.in_force
            if mhz is None or not locked or mhz <= locked[-1] * SHARE + MHZ:
                self._above_ns.pop((uuid, control), None)
                continue
            since_ns = self._above_ns.setdefault((uuid, control), t_ns)
            if 0 <= since_ns <= t_ns - LASTS_NS:
                self._above_ns[uuid, control] = -1  # it is recorded
                self._note(uuid, control, locked[-1], mhz, "lost")

    def _note(self, uuid: str, control: Control, old: int, new: int, result: str) -> None:
        def record() -> None:
            gpu = self._node.gpus.get(uuid)
            if gpu is not None:
                count = 1 if control is Control.POWER_LIMIT else 2  # a clock is a range of one
                gpu.machines[control].audit.outside((old,) * count, (new,) * count, result)

        self._post(record)
