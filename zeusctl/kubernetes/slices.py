"""UUIDs of the devices of resource claims (DRA), from the ResourceSlices that drivers publish.

kubelet names a claim's device by driver, pool and name, such as `gpu.nvidia.com/node-1/gpu-0`. Only
the API server knows which GPU that is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import urllib3
from kubernetes import client
from kubernetes.client.rest import ApiException

GROUP, RESOURCES = "resource.k8s.io", "resourceslices"
VERSIONS = ("v1", "v1beta2", "v1beta1")
"""v1: from Kubernetes 1.34 on."""
TIMEOUT_S = (5.0, 10.0)
PAUSE_S = 30.0
"""Interval between queries while some devices are unknown."""

log = logging.getLogger("zeusd_kubernetes")


class Slices:
    """The devices of a node's drivers."""

    def __init__(
        self,
        api: client.CustomObjectsApi,
        node: str,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._options: dict[str, Any] = {"field_selector": f"spec.nodeName={node}"}
        self._monotonic_s = monotonic_s
        self._known: dict[str, str] = {}
        self._asked_s: float | None = None
        self._trouble = ""

    def uuid(self, device: str) -> str | None:
        """The UUID of a device; None: not known, as for a MIG device that does not exist yet."""
        now_s = self._monotonic_s()
        if device not in self._known and (
            self._asked_s is None or now_s - self._asked_s >= PAUSE_S
        ):
            self._asked_s = now_s
            self._read()
        return self._known.get(device)

    def _read(self) -> None:
        trouble = ""
        try:
            self._known = dict(uuids_of(self._list()))
        except ApiException as error:
            trouble = (
                "the API server does not say which GPUs resource claims have "
                f"({error.status} {error.reason}); give this service account a ClusterRole with "
                f"list on {RESOURCES} of {GROUP}"
            )
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            trouble = f"the API server does not answer ({error})"
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble

    def _list(self) -> Mapping[str, Any]:
        for version in VERSIONS:
            try:
                slices: Mapping[str, Any] = self._api.list_cluster_custom_object(
                    GROUP, version, RESOURCES, **self._options, _request_timeout=TIMEOUT_S
                )
                return slices
            except ApiException as error:
                if error.status != HTTPStatus.NOT_FOUND or version == VERSIONS[-1]:
                    raise
        raise AssertionError("unreachable")


def uuids_of(slices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Devices as `driver/pool/name`, and their UUIDs, in a list of ResourceSlices."""
    for one in slices.get("items") or ():
        spec = one.get("spec") or {}
        driver, pool = spec.get("driver", ""), (spec.get("pool") or {}).get("name", "")
        for device in spec.get("devices") or ():
            attributes = device.get("attributes") or (device.get("basic") or {}).get("attributes")
            for name, value in (attributes or {}).items():
                if name.rpartition("/")[2] == "uuid" and "string" in value:
                    yield f"{driver}/{pool}/{device.get('name', '')}", value["string"]
