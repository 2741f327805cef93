"""Pods, and a kubelet that reports their GPUs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

NODE = "node-1"
NVIDIA = "nvidia.com/gpu"


def a_pod(
    name: str = "training",
    watts: str | None = "200",
    namespace: str = "research",
    *,
    gpus: int = 1,
    phase: str = "Running",
    node: str = NODE,
    annotation: str = "zeusd.dev/power-limit",
    **spec: Any,
) -> dict[str, Any]:
    """A pod's object, with its own uid."""
    annotations = {} if watts is None else {annotation: watts}
    limits = {NVIDIA: str(gpus)} if gpus else {}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": str(uuid.uuid4()),
            "annotations": annotations,
            "generation": 1,
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "c", "resources": {"limits": limits}}],
            **spec,
        },
        "status": {"phase": phase},
    }


def field(number: int, value: bytes | str) -> bytes:
    """One field of a Protocol Buffers message."""
    value = value.encode() if isinstance(value, str) else value
    length, prefix = len(value), b""
    while length > 0x7F:
        prefix += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([number << 3 | 2]) + prefix + bytes([length]) + value


def pod_resources(
    name: str, ids: Iterable[str], namespace: str = "research", resource: str = NVIDIA
) -> bytes:
    """A PodResources message. Of topology and CPUs it has something, too, as kubelet's have."""
    topology = field(3, field(1, b"\x08\x01"))
    devices = field(1, resource) + b"".join(field(2, one) for one in ids) + topology
    cpus = field(3, b"\x00\x01\x02") + b"\x29" + bytes(8) + b"\x35" + bytes(4)
    container = field(1, "c") + field(2, devices) + cpus
    return field(1, name) + field(2, namespace) + field(3, container)


def a_slice(*devices: tuple[str, str], node: str = NODE, basic: bool = False) -> dict[str, Any]:
    """A ResourceSlice with devices and their UUIDs."""

    def device(name: str, uuid: str) -> dict[str, Any]:
        attributes = {"type": {"string": "gpu"}, **({"uuid": {"string": uuid}} if uuid else {})}
        inner = {"attributes": attributes}
        return {"name": name, **({"basic": inner} if basic else inner)}

    spec = {
        "driver": "gpu.nvidia.com",
        "nodeName": node,
        "pool": {"name": node},
        "devices": [device(*one) for one in devices],
    }
    return {"metadata": {"name": "s"}, "spec": spec}


def claim(name: str, *resources: tuple[str, str, str, list[str]], namespace: str = "ml") -> bytes:
    """A PodResources message of a pod that has devices by resource claims only.

    Args:
        name: The pod.
        resources: Driver, pool, device and CDI names of each device.
        namespace: Of the pod.
    """
    parts = b""
    for driver, pool, device, names in resources:
        cdi = b"".join(field(1, field(1, one)) for one in names)
        where = field(2, driver) + field(3, pool) + field(4, device) if driver else b""
        parts += field(4, cdi + where)
    dynamic = field(2, "claim-1") + field(3, namespace) + parts
    return field(1, name) + field(2, namespace) + field(3, field(1, "c") + field(5, dynamic))


class Kubelet:
    """kubelet's PodResources, on a socket; it answers with `pods`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pods: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        method = grpc.unary_unary_rpc_method_handler(self._list)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": method}),)
        )
        self._server.add_insecure_port(f"unix://{path}")
        self._server.start()

    def _list(self, request: bytes, context: Callable[..., Any]) -> bytes:
        return b"".join(field(1, one) for one in self.pods)

    def stop(self) -> None:
        """Ends it."""
        self._server.stop(None).wait()
