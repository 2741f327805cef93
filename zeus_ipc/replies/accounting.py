"""What answers questions about the energy ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from zeus_ipc.wire import Message


class UsageSum(Message):
    """Energy of one account in one interval."""

    interval: int
    """Which of the intervals, from 0."""
    kind: str
    """job, pod, namespace, user, container or service: whose it is. idle: nobody held or used the
    GPU. unattributed: it is not known whose it is; `name` says why. others: all that the reader may
    not see one by one. process: of a process on GPUs that nobody held. gpu: of a GPU, whosever it
    is. total: of all accounts."""
    name: str
    """A job's id, `namespace/pod`, a unit, a container's id, a pid, a GPU's UUID, or a reason."""
    run: str
    """Which run of a job; of a process, when it started, in clock ticks since boot."""
    uid: int
    """The user; -1: none; below: a user who was forgotten."""
    active_uj: int
    """Energy while the GPU worked, microjoules."""
    idle_uj: int
    """Energy while the driver reported the GPU as idle."""
    lower_uj: int
    """At least this was used: the estimate itself, where it is exact."""
    upper_uj: int
    """At most this was used."""
    ns: int
    """GPU time."""
    methods: list[str]
    """allocated, exclusive (exact), weights, utilization, slices, equal (estimates); the bounds are
    of the kind that `charging.bounds_of` says."""
    begin_s: int = 0
    """When a job or pod began to hold its first GPU, or a process started, UTC; 0: not known."""
    end_s: int = 0
    """When it ceased to hold its last; 0: it has not, or that is not known."""
    workload: str = ""
    """Of a process: the job, pod, service or container that it belongs to."""


class Usage(Message):
    """Result of `usage`."""

    sums: list[UsageSum]
    """By interval, the largest first."""
    more: bool
    """There are more sums; ask again with an `offset`."""
    metered_uj: list[int]
    """What the GPUs' counters say of each interval: what the sums add up to if nothing is left
    out."""
    begins_s: int | None
    """The day on which the ledger begins, UTC; None: it is empty."""


class Deallocated(Message):
    """Result of `deallocate`."""

    ended: int
    """How many GPUs were held."""


class Forgotten(Message):
    """Result of `forget_user`."""

    accounts: int
    """How many of the user's accounts there were."""


class Estimate(Message):
    """The part of an account's energy that one method estimated, microjoules."""

    method: str
    energy_uj: int
    lower_uj: int
    upper_uj: int
    """Bounds of the kind that `charging.bounds_of` says."""


if TYPE_CHECKING:
    # A sum of accounts is made of amounts by name, all numbers, and has none of these.
    Estimates: TypeAlias = Any
else:
    Estimates = list[Estimate]


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
    """What of it is an estimate, by method; empty for a sum of several accounts."""


class GpuTotal(Message):
    """What was drawn by one GPU since the ledger began that nobody used; microjoules."""

    idle_uj: int = 0
    """Nobody held or used it."""
    held_idle_uj: int = 0
    """Charged to a holder while the driver reported the GPU as idle."""
    unattributed_uj: dict[str, int] = {}
    """Could not be charged, by reason."""


class LedgerState(Message):
    """The energy ledger, as last settled: at most a minute ago."""

    totals: list[LedgerTotal]
    """Users, namespaces, services, idle and unattributed; the sum of the others for a reader who
    may not see them."""
    counted_uj: dict[str, int]
    """What each GPU's counter has added since the ledger began, which the totals add up to."""
    held: list[str]
    """GPUs that a job or pod holds."""
    trouble: str
    """Why the ledger cannot be used, as one sentence; empty: it can."""
    damaged: list[str]
    """Files that were damaged and set aside."""
    dropped: int
    """Requests that were refused because too many waited."""
    by_gpu: dict[str, GpuTotal] = {}
    """What nobody used of each GPU, by UUID."""
    workloads: list[LedgerTotal] = []
    """Jobs and pods that hold a GPU or did in the last 5 minutes: what each has used so far, all
    runs together. A user sees own ones."""
    cpu_totals: list[LedgerTotal] = []
    """As `totals`, of CPU packages: never part of those of GPUs."""
    cpu_counted_uj: dict[str, int] = {}
    """As `counted_uj`, of CPU packages such as `cpu:0`."""
