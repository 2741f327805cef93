"""Events about pods, as `kubectl describe pod` shows them."""

from __future__ import annotations

import logging
from datetime import datetime, timezone

import urllib3
from kubernetes import client
from kubernetes.client.rest import ApiException

from zeusctl.kubernetes.pods import Pod

PROGRAM = "zeusd-kubernetes"
SET, REFUSED = "PowerLimitSet", "PowerLimitRefused"
TIMEOUT_S = 5.0

log = logging.getLogger("zeusd_kubernetes")


class Events:
    """Writes events about pods, each text once.

    Args:
        api: The API server.
        node: The node's name.
    """

    def __init__(self, api: client.CoreV1Api, node: str) -> None:
        self._api = api
        self._node = node
        self._reported: dict[str, str] = {}

    def tell(self, pod: Pod, reason: str, message: str) -> None:
        """Writes an event, unless it repeats the last one about this pod; failures are only
        logged.
        """
        if self._reported.get(pod.uid) == message:
            return
        self._reported[pod.uid] = message
        log.info("%s/%s: %s", pod.namespace, pod.name, message)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
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
            log.warning("no event could be written about %s/%s: %s", pod.namespace, pod.name, error)

    def forget_others(self, uids: set[str]) -> None:
        """Forgets all pods but these."""
        self._reported = {uid: text for uid, text in self._reported.items() if uid in uids}
