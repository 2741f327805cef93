"""Sets the ceilings that a node's pods request, a loop around the plan, and writes events about
pods, as `kubectl describe pod` shows them.

The state is in zeusd's journal, so a restarted agent continues where the last one ended. zeusd
itself ends the ceilings of pods that end while no agent runs, with the pods' control groups.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import urllib3
from kubernetes import client
from kubernetes.client.rest import ApiException

from zeus_common.checks import read_states
from zeus_common.text import named
from zeus_ipc import Client
from zeus_ipc.errors import ErrorCode, ZeusIpcError
from zeus_ipc.overriding import override
from zeus_ipc.replies import GpuInfo
from zeusctl.kubernetes.kubelet import DRIVERS, Kubelet, KubeletUnavailable
from zeusctl.kubernetes.plan import (
    REFUSED,
    SET,
    Bounds,
    CeilingPlan,
    PodDevices,
    condition_of,
    differences,
    held,
    plan,
)
from zeusctl.kubernetes.pods import CONDITION, Pod, PodCondition
from zeusctl.kubernetes.watch import PodWatch

PROGRAM = "zeusd-kubernetes"
TIMEOUT_S = 5.0

RESYNC_S = 15.0
"""Interval between full comparisons while no pod changes."""

_NOT_THE_PODS = frozenset(
    {
        *(ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT, ErrorCode.SHUTTING_DOWN, ErrorCode.OVERLOADED),
        *(ErrorCode.DEADLINE_EXCEEDED, ErrorCode.QUIESCED),
        *(ErrorCode.ACCESS_REFUSED, ErrorCode.PERMISSION_DENIED),
    }
)
"""Errors of zeusd or this program, as opposed to a pod's request."""

Resolve = Callable[[str], "str | None"]

log = logging.getLogger("zeusd_kubernetes")


def unresolved(device: str) -> str | None:
    """Knows the UUID of no device."""
    return None


class Events:
    """Writes events about pods, each text once, and their conditions."""

    def __init__(self, api: client.CoreV1Api, node: str) -> None:
        self._api = api
        self._node = node
        self._reported: dict[str, str] = {}
        self._shown: dict[str, tuple[PodCondition, float]] = {}
        self._trouble = ""

    def tell(self, pod: Pod, reason: str, message: str) -> None:
        """Writes an event, unless it repeats the last one about this pod; failures are only
        logged.
        """
        if self._reported.get(pod.uid) == message:
            return
        self._reported[pod.uid] = message
        log.info("%s/%s: %s", pod.namespace, pod.name, message)
        now = _now()
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{pod.name}.", "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "uid": pod.uid,
                "namespace": pod.namespace,
                "name": pod.name,
            },
            "type": "Normal" if reason == SET else "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": PROGRAM, "host": self._node},
            "reportingComponent": PROGRAM,
            "reportingInstance": self._node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._api.create_namespaced_event(pod.namespace, event, _request_timeout=TIMEOUT_S)
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            log.warning("cannot write an event about %s/%s: %s", pod.namespace, pod.name, error)

    def show(self, pod: Pod, wanted: PodCondition) -> None:
        """Writes a pod's condition, unless it has it, or was given it a moment ago."""
        written, at_s = self._shown.get(pod.uid, (None, 0.0))
        # Interval between attempts to write a pod's condition.
        if wanted == pod.condition or (written == wanted and time.monotonic() - at_s < 30.0):
            return
        self._shown[pod.uid] = wanted, time.monotonic()
        condition = {"type": CONDITION, "lastTransitionTime": _now(), **wanted._asdict()}
        if pod.generation is not None:
            condition["observedGeneration"] = pod.generation
        # The uid: not in another pod of this name.
        body = {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}
        trouble = ""
        try:
            self._api.patch_namespaced_pod_status(
                pod.name, pod.namespace, body, _request_timeout=TIMEOUT_S
            )
        except ApiException as error:
            if error.status not in (404, 409):  # it is deleted
                trouble = f"{error.status} {error.reason}; a role with patch on pods/status lets it"
        except (urllib3.exceptions.HTTPError, OSError) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            log.warning("the limits in force cannot be shown in pods' status: %s", trouble)
        self._trouble = trouble

    def forget_others(self, uids: set[str]) -> None:
        """Forgets all pods but these."""
        self._reported = {uid: text for uid, text in self._reported.items() if uid in uids}
        self._shown = {uid: one for uid, one in self._shown.items() if uid in uids}


class PodFollower(ABC):
    """Keeps zeusd in step with a node's pods. Its user must be an administrator of zeusd.

    Args:
        sources: The pods of each namespace that counts.
        uuid: The UUID of a device of a resource claim, called `driver/pool/name`; None: not known.

    Attributes:
        trouble: Why the last attempt failed; None: it did not.
    """

    def __init__(
        self, zeusd: Client, sources: Sequence[PodWatch], kubelet: Kubelet, uuid: Resolve
    ) -> None:
        self._zeusd = zeusd
        self._sources = sources
        self._kubelet = kubelet
        self._uuid = uuid
        self.trouble: Exception | None = None

    @abstractmethod
    def reconcile(self) -> bool:
        """Applies what has changed. Returns whether to call it again soon.

        Raises:
            ZeusIpcError: zeusd did not answer, or this user is not an administrator.
            KubeletUnavailable: kubelet did not.
        """

    def attempt(self) -> bool:
        """The same, but logs errors: each once, not at every attempt."""
        try:
            again = self.reconcile()
        except (ZeusIpcError, KubeletUnavailable) as error:
            if str(error) != str(self.trouble):
                log.warning("%s", error)
            self.trouble = error
            return True
        self.trouble = None
        return again

    def pods(self) -> list[Pod] | None:
        """All pods; None: not all are known yet, such as one that runs or has ended."""
        seen = [source.pods() for source in self._sources]
        return None if None in seen else [pod for some in seen for pod in some or ()]

    def devices(self) -> PodDevices:
        """The devices of each pod; those of claims by UUID, where it is known.

        Raises:
            KubeletUnavailable: It did not answer.
        """
        return {
            pod: [*dict.fromkeys(self._named(gpu_id) for gpu_id in ids)]
            for pod, ids in self._kubelet.devices().items()
        }

    def _named(self, device: str) -> str:
        claimed = device.startswith(tuple(f"{driver}/" for driver in DRIVERS))
        return (self._uuid(device) if claimed else None) or device


class Agent(PodFollower):
    """The agent of one node.

    Args:
        changed: Set when a pod has changed.
        resync_s: Interval between full comparisons while no pod changes.
    """

    def __init__(
        self,
        zeusd: Client,
        sources: Sequence[PodWatch],
        kubelet: Kubelet,
        events: Events,
        changed: threading.Event,
        uuid: Resolve = unresolved,
        resync_s: float = RESYNC_S,
    ) -> None:
        super().__init__(zeusd, sources, kubelet, uuid)
        self._events = events
        self._changed = changed
        self._resync_s = resync_s

    def run(self, ended: threading.Event) -> None:
        """Runs until `ended` is set, and `changed` with it. Ceilings stay, as the pods keep
        running.
        """
        while not ended.is_set():
            self._changed.clear()
            # Interval between queries to kubelet about a pod that has no GPUs yet.
            self._changed.wait(0.5 if self.attempt() else self._resync_s)

    @override
    def reconcile(self) -> bool:
        pods = self.pods()
        if pods is None:
            return True  # a ceiling may belong to a pod that runs
        self._events.forget_others({pod.uid for pod in pods})
        asks = any(pod.asked and not pod.ended for pod in pods)
        gpus = self._zeusd.node().gpus
        if not gpus:
            return True  # no driver; zeusd keeps the ceilings until it is back
        wanted = plan(pods, self.devices() if asks else {}, gpus)
        put, removed = differences(wanted, held(gpus))
        for uuid, name in removed:
            log.info("%s: removing the ceiling %s", _label(uuid, gpus), name)
            self._zeusd.set_ceiling(uuid, name, None)
        self._put(put, wanted, gpus)
        for pod, why in wanted.refusals.items():
            self._events.tell(pod, REFUSED, why)
        self._show(pods, wanted)
        return bool(wanted.waiting)

    def _show(self, pods: Sequence[Pod], wanted: CeilingPlan) -> None:
        """Writes the pods' conditions."""
        pods = [pod for pod in pods if not pod.ended and (pod.asked or pod.condition)]
        if not pods:
            return
        gpus = self._zeusd.node().gpus
        limited = {uuid for uuid, _ in wanted.bounds}
        states, _ = read_states(self._zeusd, [gpu for gpu in gpus if gpu.uuid in limited])
        for pod in pods:
            shown = condition_of(pod, wanted, gpus, states)
            if shown is not None:
                self._events.show(pod, shown)

    def _put(self, bounds: Bounds, wanted: CeilingPlan, gpus: Sequence[GpuInfo]) -> None:
        done: dict[Pod, list[str]] = {}
        for (uuid, name), bound_mw in bounds.items():
            pod = wanted.pods[name]
            try:
                highest_mw = self._zeusd.set_ceiling(uuid, name, bound_mw)[uuid]
            except ZeusIpcError as error:
                if error.code in _NOT_THE_PODS:
                    raise
                indices = {gpu.uuid: gpu.index for gpu in gpus}
                wanted.refusals[pod] = f"{pod.asks}: {named(str(error), indices)}"
                continue
            done.setdefault(pod, []).append(
                f"{_label(uuid, gpus)}: at most {highest_mw / 1000:g} W until the pod ends"
            )
        for pod, texts in done.items():
            if pod not in wanted.refusals:
                self._events.tell(pod, SET, "; ".join(texts))


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _label(uuid: str, gpus: Sequence[GpuInfo]) -> str:
    return next((f"GPU {gpu.index}" for gpu in gpus if gpu.uuid == uuid), uuid)
