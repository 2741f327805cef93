"""Replies about the energy ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from zeus_ipc.wire import Message


class UsageSum(Message):
    """Energy of one account in one interval."""

    interval: int
    """Number of the interval, from 0."""
    kind: str
    """job, pod, namespace, user, container or service: the account. idle: nobody held or used the
    GPU. unattributed: the account is unknown; `name` says why. others: the sum of accounts that the
    reader may not see. process: a process on GPUs that nobody held. gpu: a GPU, over all accounts.
    total: all accounts."""
    name: str
    """A job's id, `namespace/pod`, a unit, a container's id, a pid, a GPU's UUID, or a reason."""
    run: str
    """The run of a job; for a process, its start time in clock ticks since boot."""
    uid: int
    """The user; -1: none; lower: a user who was removed."""
    active_uj: int
    """Energy while the GPU worked, microjoules."""
    idle_uj: int
    """Energy while the driver reported the GPU as idle."""
    lower_uj: int
    """Lower bound; the value itself if it is exact."""
    upper_uj: int
    """Upper bound."""
    ns: int
    """GPU time."""
    methods: list[str]
    """allocated, exclusive (exact), weights, utilization, slices, equal, unread (estimates);
    `charging.bounds_of` gives the basis of the bounds."""
    begin_s: int = 0
    """When a job or pod began to hold its first GPU, or a process started, UTC; 0: unknown."""
    end_s: int = 0
    """When it ceased to hold its last; 0: it still holds one, or that is unknown."""
    workload: str = ""
    """Of a process: the job, pod, service or container that it belongs to."""
    first_ms: int = 0
    """By job, pod, account or process: when in the interval it was charged first, UTC; 0: days
    that are kept as a whole."""
    last_ms: int = 0
    """The same for the end of the last charge."""
    limited_ns: dict[str, int] = {}
    """Of a job or pod: GPU time in which clocks were limited, by cause: a reason
    (`limited.REASONS`), or `power:AUTHOR` (see `GpuState.limit_author`)."""


class Usage(Message):
    """Result of `usage`."""

    sums: list[UsageSum]
    """By interval, the largest first."""
    more: bool
    """There are more sums; ask again with an `offset`."""
    metered_uj: list[int]
    """The GPUs' counters for each interval: the sums add up to them if nothing is excluded."""
    begins_s: int | None
    """The first day in the ledger, UTC; None: it is empty."""
    settled_ms: int = 0
    """Time until which all of the GPUs' energy is charged, UTC; 0: nothing is in this boot."""


class Deallocated(Message):
    """Result of `deallocate`."""

    ended: int
    """Number of GPUs that were held."""


class Forgotten(Message):
    """Result of `forget_user`."""

    accounts: int
    """Number of the user's accounts."""


class EstimatedEnergy(Message):
    """The part of an account's energy that one method estimated, microjoules."""

    method: str
    energy_uj: int
    lower_uj: int
    upper_uj: int
    """Bounds; `charging.bounds_of` gives their basis."""


if TYPE_CHECKING:
    # A sum of accounts is made of amounts by name, all numbers, and has none of these.
    Estimates: TypeAlias = Any
else:
    Estimates = list[EstimatedEnergy]


class LedgerTotal(Message):
    """Energy of one account since the ledger began, microjoules; see `UsageSum`."""

    kind: str
    name: str
    uid: int
    active_uj: int
    idle_uj: int
    lower_uj: int
    upper_uj: int
    estimates: Estimates = []
    """The part that is an estimate, by method; empty for a sum of several accounts."""


class GpuTotal(Message):
    """Unused energy of one GPU since the ledger began; microjoules."""

    idle_uj: int = 0
    """Nobody held or used it."""
    held_idle_uj: int = 0
    """Charged to a holder while the driver reported the GPU as idle."""
    unattributed_uj: dict[str, int] = {}
    """Could not be charged, by reason."""


class Held(Message):
    """A GPU that a job or pod holds."""

    gpu: str
    """Its UUID."""
    kind: str = ""
    """job or pod; empty: the reader may not see whose it is, nor the following fields."""
    name: str = ""
    run: str = ""
    uid: int = -1
    """The user; -1: unknown."""
    weight: int = 0
    """Its part beside other holders; 0: all of the GPU."""
    parts: int = 0
    """Number of parts of the GPU; 0: those that are held."""
    since_ns: int = 0
    """CLOCK_MONOTONIC."""


class LedgerState(Message):
    """The energy ledger, as last settled: at most a minute ago."""

    totals: list[LedgerTotal]
    """Users, namespaces, services, idle and unattributed; for a reader who may not see the others,
    their sum."""
    counted_uj: dict[str, int]
    """The increase of each GPU's counter since the ledger began; the totals add up to it."""
    held: list[Held]
    """What jobs and pods hold."""
    damaged: list[str]
    """Damaged files that were set aside."""
    dropped: int
    """Requests that were refused because the queue was full."""
    by_gpu: dict[str, GpuTotal] = {}
    """Unused energy of each GPU, by UUID."""
    workloads: list[LedgerTotal] = []
    """Jobs and pods that hold a GPU or did in the last 5 minutes: their energy so far, all runs
    together. Users see their own."""
    cpu_totals: list[LedgerTotal] = []
    """Like `totals`, for CPU packages: never part of the totals of GPUs."""
    cpu_counted_uj: dict[str, int] = {}
    """Like `counted_uj`, for CPU packages such as `cpu:0`."""
