"""The core's view of the node: its GPUs, their controls, and the site's settings."""

from __future__ import annotations

from collections.abc import Callable

from zeus_ipc.controls import Control
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import CpuInfo, GpuInfo, NodeProblem
from zeusd.core.bounds import PERSISTED, author
from zeusd.core.control import ControlMachine
from zeusd.core.entries import PendingRestore
from zeusd.core.model import Failure, GpuFacts, ProcessIdentity, Refusal
from zeusd.core.outbox import Outbox
from zeusd.core.policy import CoreSettings

MISSING = "zeusd does not find this GPU, and restores it when it returns"


class NodeGpu:
    """A GPU, and its controls in the order in which they are restored."""

    def __init__(self, facts: GpuFacts, machines: dict[Control, ControlMachine]) -> None:
        self.facts = facts
        self.machines = machines

    @property
    def info(self) -> GpuInfo:
        """Its constant properties."""
        return self.facts.info

    @property
    def shares_power(self) -> bool:
        """Whether another GPU reports its power limit and energy."""
        return self.info.power_domain[:1] not in ([], [self.info.uuid])

    def listed(self) -> list[ControlMachine]:
        """Its controls in display order."""
        return [self.machines[control] for control in Control if control in self.machines]


class NodeState:
    """The state that requests refer to and events change."""

    def __init__(self, settings: CoreSettings, owner_of: Callable[[int], int]) -> None:
        self.settings = settings
        self.owner_of = owner_of  # of a subordinate uid, the user who has it
        self.out = Outbox()
        self.out.audit_log.owner_of = owner_of
        self.driver_version: str | None = None
        self.gpus: dict[str, NodeGpu] = {}
        self.stopping = False
        self.started_ns = 0
        self.quiesced_ns: int | None = None
        self.closed: Failure | None = None
        self.cpus: list[CpuInfo] = []
        # Controls by watched process: the holder, and processes that lost a lease.
        self.watched: dict[ProcessIdentity, list[ControlMachine]] = {}
        self.losers: set[ProcessIdentity] = set()
        self.problems: Callable[[], list[NodeProblem]] = list
        # Of GPUs that zeusd has not found since it started, from the journal; processes that run.
        self.pending: dict[tuple[str, Control], PendingRestore] = {}
        self.alive: set[ProcessIdentity] = set()

    @property
    def quiesced(self) -> Failure | None:
        """Why the GPUs are not available, while zeusd is quiesced."""
        if self.quiesced_ns is None:
            return None
        return Failure(
            ErrorCode.QUIESCED,
            "zeusd is quiesced by an administrator; wait for `zeusctl resume`",
        )

    @property
    def sources(self) -> set[str]:
        """Other devices whose energy is sampled."""
        names = {f"cpu:{cpu.index}" for cpu in self.cpus}
        names |= {f"dram:{cpu.index}" for cpu in self.cpus if cpu.dram}
        modules = {gpu.info.module for gpu in self.gpus.values()} - {None}
        return names | {f"module:{module}" for module in modules}

    def restore_due(self, restore: PendingRestore) -> bool:
        """Whether a GPU that zeusd does not find is to be restored; else its holder still runs."""
        return bool(restore.ending) or restore.holder not in self.alive

    def machines(self) -> list[ControlMachine]:
        """Every control of every GPU, in the order in which they are restored."""
        return [machine for gpu in self.gpus.values() for machine in gpu.machines.values()]

    def held_by(self, process: ProcessIdentity) -> list[ControlMachine]:
        """The controls that this process holds, in the order in which they are restored."""
        held = {control for control in self.watched.get(process, ()) if control.holding.by(process)}
        return sorted(held, key=lambda control: (control.gpu, control.spec.restore_order))

    def machine(self, uuid: str, control: Control) -> ControlMachine:
        """One control.

        Raises:
            Refusal: There is none.
        """
        gpu = self.gpus.get(uuid)
        if gpu is None:
            raise Refusal(self.unknown(uuid))
        machine = gpu.machines.get(control)
        if machine is not None:
            return machine
        why = f"{gpu.info.name} {uuid} does not offer {control.value}; omit it"
        if control is Control.POWER_LIMIT and gpu.shares_power:
            why = (
                f"{gpu.info.name} {uuid} shares its power limit with {gpu.info.power_domain[0]}, "
                "which has it for both; set that one's"
            )
        raise Refusal(Failure(ErrorCode.NOT_SUPPORTED, why))

    def limit_author(self, uuid: str, limit_mw: int | None, enforced_mw: int | None) -> str | None:
        """Who set a GPU's power limit in force, see `bounds.author`. Any thread may ask."""
        gpu = self.gpus.get(uuid)
        machine = None if gpu is None else gpu.machines.get(Control.POWER_LIMIT)
        if gpu is None or machine is None:
            return None
        site_mw, leased = machine.bounds.site_limit_mw, machine.values.newest
        return author(
            limit_mw,
            enforced_mw,
            leased[0] if leased and machine.lease is not None else None,
            None if site_mw == gpu.info.power_limit_max_mw else site_mw,
            {name: one.value[0] for name, one in dict(machine.ceilings).items()},
        )

    def unreadable(self, uuid: str) -> dict[str, list[int]]:
        """Values of controls that no driver can read back, by name."""
        return {
            control.value: list(machine.in_force)
            for control, machine in self.gpus[uuid].machines.items()
            if not machine.spec.readable
        }

    def unknown(self, uuid: str) -> Failure:
        """The failure of a request for a GPU that this node does not have, or that is not known
        while quiesced."""
        if self.quiesced is not None:
            return self.quiesced
        known = (
            ", ".join([*self.gpus, *sorted(self.sources)]) or "none; is the NVIDIA driver loaded?"
        )
        return Failure(ErrorCode.UNKNOWN_GPU, f"no GPU {uuid} on this node; it has: {known}")

    def bounds(self, machine: ControlMachine, admin: bool = False) -> tuple[int, int] | None:
        """The lowest and the highest value that a control may be set to; None: unknown.

        For an administrator, a persisted value is not a bound.
        """
        info = self.gpus[machine.gpu].info
        if machine.spec.ceilings:
            (high,) = machine.bounds.highest(PERSISTED if admin else "")
            low = info.power_limit_min_mw
            return None if low is None else (low, high)
        clocks = {
            Control.GPU_CLOCKS: info.gpu_clock_range_mhz,
            Control.MEMORY_CLOCKS: info.memory_clocks_mhz,
        }.get(machine.control)
        return (min(clocks), max(clocks)) if clocks else None
