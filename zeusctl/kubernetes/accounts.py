"""Tells zeusd which pod holds which GPU, so that energy is charged to pods and namespaces.

kubelet is polled every two seconds: it names pods, not their uids, and sends no notifications. Pods
that have ended may stay in its list until the next pod asks for their GPUs, so pods that have ended
according to the Kubernetes API are left out. A kubelet that has just started may not list running
pods: they keep their allocations until they end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.overriding import override
from zeusctl.kubernetes.agent import PodFollower, Resolve, log, unresolved
from zeusctl.kubernetes.kubelet import Kubelet
from zeusctl.kubernetes.plan import PodDevices
from zeusctl.kubernetes.pods import Pod
from zeusctl.kubernetes.watch import PodWatch
from zeusctl.parts import Devices, Holding, ManagedAllocations, mig_devices, together


def holdings(
    devices: PodDevices,
    pods: Iterable[Pod],
    node: Devices,
) -> tuple[set[Holding], set[str]]:
    """Returns what each pod holds, and the ids of devices that do not belong to this node.

    Args:
        devices: From kubelet.
        pods: As far as the Kubernetes API knows them.
    """
    known = {(pod.namespace, pod.name): pod for pod in pods}
    held: set[Holding] = set()
    unknown: set[str] = set()
    for key, ids in devices.items():
        pod = known.get(key)
        if pod is not None and pod.ended:
            continue
        parts = []
        for gpu_id in ids:
            part = node.find(gpu_id)
            if part is None:
                unknown.add(gpu_id)
            else:
                parts.append(part)
        group = "" if pod is None else pod.job
        held |= {Holding("pod", "/".join(key), part, group, group) for part in together(parts)}
    return _shared(held), unknown


def _shared(held: set[Holding]) -> set[Holding]:
    """Makes pods that share a GPU holders of parts of it."""
    holders: dict[str, int] = {}
    for one in held:
        holders[one.part.gpu] = holders.get(one.part.gpu, 0) + 1
    return {
        replace(one, part=replace(one.part, weight=1))
        if holders[one.part.gpu] > 1 and not one.part.weight
        else one
        for one in held
    }


def _unlisted(
    held: Iterable[Holding],
    wanted: Iterable[Holding],
    devices: PodDevices,
    pods: Iterable[Pod],
) -> set[Holding]:
    """Returns what pods hold that run according to the Kubernetes API but that kubelet does not
    list.
    """
    running = {(f"{pod.namespace}/{pod.name}", pod.job) for pod in pods if not pod.ended}
    listed = {"/".join(key) for key in devices}
    taken = {one.part.gpu for one in wanted if not one.part.weight}
    shared = {one.part.gpu for one in wanted}
    return {
        one
        for one in held
        if one.name not in listed
        and (one.name, one.control_group) in running
        and one.part.gpu not in (taken if one.part.weight else shared)
    }


class PodAccounts(PodFollower):
    """Keeps zeusd's allocations in step with kubelet.

    Args:
        uuid: See `PodFollower`.
        period_s: How often kubelet is asked.
    """

    def __init__(
        self,
        zeusd: Client,
        sources: Sequence[PodWatch],
        kubelet: Kubelet,
        uuid: Resolve = unresolved,
        period_s: float = 2.0,
    ) -> None:
        super().__init__(zeusd, sources, kubelet, uuid)
        self._period_s = period_s
        self._allocations = ManagedAllocations(zeusd)
        self._repeat = False
        self._unknown: set[str] = set()

    def run(self, ended: threading.Event) -> None:
        """Runs until `ended` is set. Allocations stay, as the pods keep running."""
        while not ended.is_set():
            self.attempt()
            # zeusd may have been restarted; allocating twice is not an error.
            self._repeat |= isinstance(self.trouble, ZeusIpcError)
            ended.wait(self._period_s)

    @override
    def reconcile(self) -> bool:
        pods = self.pods()
        if pods is None:
            return True
        gpus = self._zeusd.node().gpus
        if not gpus:
            return True  # no driver; zeusd keeps the allocations until it is back
        devices = self.devices()
        wanted, unknown = holdings(devices, pods, Devices(gpus, mig_devices(self._zeusd, gpus)))
        for one in sorted(unknown - self._unknown):
            log.warning("zeusd does not know kubelet's device %s; it is charged to no pod", one)
        self._unknown = unknown
        wanted |= _unlisted(self._allocations.held, wanted, devices, pods)
        for new in self._allocations.keep(wanted, again=self._repeat)[0]:
            log.info("%s holds %s", new.name, new.part.gpu)
        self._repeat = False
        return False
