"""Computes the ceilings that a node's GPUs should have, and the difference from the present ones.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zeus_ipc.controls import Control
from zeus_ipc.replies import GpuInfo
from zeusctl.kubernetes.pods import ANNOTATION, Pod, milliwatts
from zeusctl.parts import Devices

JOB = "job:"
_POD = re.compile(r"job:[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")
"""Names of pods' ceilings. Those of Slurm jobs contain numbers or SLUIDs."""

Bounds = dict[tuple[str, str], int]
"""By a GPU's UUID and a ceiling's name: mW."""

PodDevices = Mapping[tuple[str, str], Sequence[str]]
"""By a pod's namespace and name: the ids that its device plugin gave its GPUs."""


@dataclass(slots=True)
class Plan:
    """The wanted ceilings.

    Attributes:
        refusals: By pod: why it gets none, for its user.
        waiting: Ceilings of pods whose GPUs kubelet does not list: before it admits the pod, and
            for a while after its device plugin restarts.
    """

    bounds: Bounds = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    refusals: dict[Pod, str] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)


def plan(pods: Iterable[Pod], devices: PodDevices, gpus: Sequence[GpuInfo]) -> Plan:
    """Returns the ceilings that these pods request."""
    found = Plan()
    for pod in pods:
        if pod.asked is None or pod.ended:
            continue
        bound_mw, ids = milliwatts(pod.asked), devices.get((pod.namespace, pod.name), ())
        if bound_mw is None:
            found.refusals[pod] = (
                f'{ANNOTATION}: "{pod.asked}" is not a number of watts; write, for example, "200"'
            )
        elif not ids and not pod.resources:
            found.refusals[pod] = f"{ANNOTATION}: " + (
                "GPUs of resource claims are not supported; request them from a device plugin, "
                'such as "nvidia.com/gpu: 1"'
                if pod.claims
                else "no container of the pod requests a GPU"
            )
        elif not ids:
            found.waiting.add(JOB + pod.job)
        else:
            _bound(found, pod, bound_mw, ids, Devices(gpus))
    return found


def _bound(found: Plan, pod: Pod, bound_mw: int, ids: Sequence[str], node: Devices) -> None:
    name = JOB + pod.job
    found.pods[name] = pod
    for one in ids:
        part = node.find(one)
        if part is None:
            divided = "a part of a GPU has no power limit of its own; request whole GPUs"
            unknown = "zeusd does not know it; `zeusctl doctor` on the node says why"
            why = divided if one.startswith("MIG-") or "/gi" in one else unknown
            found.refusals[pod] = f"{ANNOTATION}: GPU {one}: {why}"
        else:
            found.bounds[part.gpu, name] = bound_mw


def held(gpus: Sequence[GpuInfo]) -> Bounds:
    """Returns the pods' ceilings in force."""
    return {
        (gpu.uuid, one.name): one.value[0]
        for gpu in gpus
        for one in gpu.ceilings
        if one.control == Control.POWER_LIMIT.value and _POD.fullmatch(one.name)
    }


def differences(wanted: Plan, now: Bounds) -> tuple[Bounds, list[tuple[str, str]]]:
    """Returns the ceilings to set and to remove; none is removed of a pod whose GPUs are
    unknown.
    """
    put = {key: bound for key, bound in wanted.bounds.items() if now.get(key) != bound}
    kept = wanted.bounds.keys() | {key for key in now if key[1] in wanted.waiting}
    return put, [key for key in now if key not in kept]
