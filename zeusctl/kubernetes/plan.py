"""Computes the ceilings that a node's GPUs should have, the difference from the present ones, and
what the pods are told about it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zeus_common.units import WATT_MW
from zeus_ipc.controls import Control
from zeus_ipc.limited import BMC, BY_LEASE, SITE
from zeus_ipc.replies import GpuInfo, GpuState
from zeusctl.kubernetes.pods import Pod, PodCondition, milliwatts
from zeusctl.parts import Devices

JOB = "job:"
_POD = re.compile(r"job:[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")
"""Names of pods' ceilings. Those of Slurm jobs contain numbers or SLUIDs."""

Bounds = dict[tuple[str, str], int]
"""By a GPU's UUID and a ceiling's name: mW."""


SET, EXCEEDED, REFUSED = "PowerLimitSet", "PowerLimitExceeded", "PowerLimitRefused"
WAITING, NONE = "PowerLimitPending", "PowerLimitNone"
"""Reasons of pods' events and conditions."""

PodDevices = Mapping[tuple[str, str], Sequence[str]]
"""By a pod's namespace and name: the ids that its device plugin gave its GPUs."""


@dataclass(slots=True)
class CeilingPlan:
    """The wanted ceilings.

    Attributes:
        refusals: By pod: what is not obeyed and why, for its user.
        waiting: Ceilings of pods whose GPUs are not known: before kubelet admits the pod, for a
            while after its device plugin restarts, and until the API server names a claim's device.
    """

    bounds: Bounds = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    refusals: dict[Pod, str] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)


def plan(pods: Iterable[Pod], devices: PodDevices, gpus: Sequence[GpuInfo]) -> CeilingPlan:
    """Returns the ceilings that these pods request."""
    ceilings = CeilingPlan()
    for pod in pods:
        bounds_mw = [] if pod.ended else [*_bounds(ceilings, pod)]
        ids = devices.get((pod.namespace, pod.name), ())
        if not bounds_mw:
            continue
        # kubelet has the devices of claims before it starts a pod.
        if ids:
            _bound(ceilings, pod, min(bounds_mw), ids, Devices(gpus))
        elif pod.resources or (pod.claims and not pod.running):
            ceilings.waiting.add(JOB + pod.job)
        else:
            ceilings.refusals[pod] = f"{pod.asks}: " + (
                "none of the pod's resource claims has a GPU"
                if pod.claims
                else "no container of the pod requests a GPU"
            )
    return ceilings


def _bounds(ceilings: CeilingPlan, pod: Pod) -> Iterator[int]:
    """The limits that a pod asks for, mW; those that are not numbers are refused."""
    for annotation, text in pod.asked:
        bound_mw = milliwatts(annotation, text)
        if bound_mw is not None:
            yield bound_mw
        else:
            ceilings.refusals[pod] = (
                f'{annotation}: "{text}" is not a number of watts; write, for example, "200"'
            )


def _bound(
    ceilings: CeilingPlan, pod: Pod, bound_mw: int, ids: Sequence[str], node: Devices
) -> None:
    name = JOB + pod.job
    ceilings.pods[name] = pod
    for gpu_id in ids:
        part = node.find(gpu_id)
        if part is not None:
            ceilings.bounds[part.gpu, name] = bound_mw
            continue
        if gpu_id.startswith("MIG-") or "/gi" in gpu_id or "-mig-" in gpu_id:
            why = "a part of a GPU has no power limit of its own; request whole GPUs"
        elif "/" in gpu_id:  # a ceiling that is in force stays
            ceilings.waiting.add(name)
            why = "the API server does not say which GPU this is; see the log of this node's agent"
        else:
            why = "zeusd does not know it; `zeusctl doctor` on the node says why"
        ceilings.refusals[pod] = f"{pod.asks}: GPU {gpu_id}: {why}"


def held(gpus: Sequence[GpuInfo]) -> Bounds:
    """Returns the pods' ceilings in force."""
    return {
        (gpu.uuid, ceiling.name): ceiling.value[0]
        for gpu in gpus
        for ceiling in gpu.ceilings
        if ceiling.control == Control.POWER_LIMIT.value and _POD.fullmatch(ceiling.name)
    }


def differences(wanted: CeilingPlan, now: Bounds) -> tuple[Bounds, list[tuple[str, str]]]:
    """Returns the ceilings to set and to remove; none is removed of a pod whose GPUs are
    unknown.
    """
    put = {key: bound for key, bound in wanted.bounds.items() if now.get(key) != bound}
    kept = wanted.bounds.keys() | {key for key in now if key[1] in wanted.waiting}
    return put, [key for key in now if key not in kept]


def condition_of(
    pod: Pod, wanted: CeilingPlan, gpus: Sequence[GpuInfo], states: Mapping[str, GpuState]
) -> PodCondition | None:
    """Returns what a pod's status should say; None: nothing.

    Args:
        gpus: With the ceilings that are now in force.
        states: Of the GPUs that have an answer, by UUID.
    """
    name = JOB + pod.job
    limits = [
        (gpu, bound_mw, states[gpu.uuid])
        for gpu in gpus
        if (bound_mw := wanted.bounds.get((gpu.uuid, name))) is not None and gpu.uuid in states
    ]
    if not pod.asked:
        return pod.condition and PodCondition("False", NONE, "the pod asks for no power limit")
    if pod in wanted.refusals:
        return PodCondition("False", REFUSED, wanted.refusals[pod])
    if name in wanted.waiting:
        return PodCondition("False", WAITING, "the pod has no GPU yet")
    texts, exceeded = [], False
    for gpu, bound_mw, state in limits:
        limit_mw, author = _author(gpu, state, name)
        exceeded |= limit_mw > bound_mw + WATT_MW
        texts.append(f"GPU {gpu.index} ({gpu.uuid}): at most {limit_mw / 1000:g} W, by {author}")
    if not exceeded and len(texts) < max(1, sum(one == name for _, one in wanted.bounds)):
        return pod.condition  # a GPU of it does not answer
    return PodCondition(
        "False" if exceeded else "True", EXCEEDED if exceeded else SET, "; ".join(texts)
    )


_SET_BY = {
    BMC: "the board or its BMC",
    SITE: "the site limit",
    BY_LEASE: "a lease",
    None: "someone outside zeusd",
}


def _author(gpu: GpuInfo, state: GpuState, own: str) -> tuple[int, str]:
    """A GPU's limit in force, mW, and who set it."""
    limits = state.power_limit_mw, state.enforced_power_limit_mw, gpu.power_limit_max_mw
    limit, set_by = min(one for one in (*limits, 1 << 31) if one), state.limit_author
    return limit, "this pod" if set_by == own else _SET_BY.get(set_by, f"the ceiling {set_by}")
