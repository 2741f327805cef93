"""Which GPUs each pod of this node has, from kubelet's PodResources API (v1, gRPC)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc

from zeusctl.kubernetes.pods import VENDORS

METHOD = "/v1.PodResourcesLister/List"

# The numbers of the fields that are read, in ListPodResourcesResponse and the messages in it.
_PODS = 1
_POD_NAME, _POD_NAMESPACE, _POD_CONTAINERS = 1, 2, 3
_CONTAINER_DEVICES, _CONTAINER_DYNAMIC = 2, 5
_DEVICES_RESOURCE, _DEVICES_IDS = 1, 2
_DYNAMIC_RESOURCES = 4
_RESOURCE_CDI, _RESOURCE_DRIVER, _RESOURCE_POOL, _RESOURCE_DEVICE = 1, 2, 3, 4
_CDI_NAME = 1

DRIVERS = ("gpu.nvidia.com", "gpu.amd.com")
"""Drivers of resource claims (DRA) whose devices are GPUs."""
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class KubeletUnavailable(Exception):
    """kubelet did not answer."""


class Kubelet:
    """The kubelet of this node; only root may open its socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        # The same bound as kubelet's own clients use.
        options = [("grpc.max_receive_message_length", 16 << 20)]
        self._channel = grpc.insecure_channel(f"unix://{path}", options=options)
        self._list = self._channel.unary_unary(METHOD)

    def devices(self) -> dict[tuple[str, str], list[str]]:
        """The ids of GPUs, by a pod's namespace and name.

        Raises:
            KubeletUnavailable: It did not answer, or its answer is malformed.
        """
        try:
            answer = self._list(b"", timeout=5.0)
            return devices_of(answer)
        except grpc.RpcError as error:
            reason = error.details() if isinstance(error, grpc.Call) else str(error)
        except ValueError as error:
            reason = str(error)
        raise KubeletUnavailable(
            f"kubelet does not say which GPUs pods have ({self._path}: {reason}); mount "
            "/var/lib/kubelet/pod-resources, and run as root"
        )

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()


def devices_of(answer: bytes) -> dict[tuple[str, str], list[str]]:
    """The ids of GPUs in a ListPodResourcesResponse, by a pod's namespace and name: those of device
    plugins, and of resource claims by UUID where their CDI names have one, else as
    `driver/pool/name`.

    Raises:
        ValueError: It is not such a message.
    """
    by_pod: dict[tuple[str, str], list[str]] = {}
    for pod in _all(answer, _PODS):
        name, namespace = _text(pod, _POD_NAME), _text(pod, _POD_NAMESPACE)
        ids = [
            value.decode()
            for container in _all(pod, _POD_CONTAINERS)
            for devices in _all(container, _CONTAINER_DEVICES)
            if _text(devices, _DEVICES_RESOURCE).startswith(VENDORS)
            for value in _all(devices, _DEVICES_IDS)
        ]
        ids += [
            one
            for container in _all(pod, _POD_CONTAINERS)
            for dynamic in _all(container, _CONTAINER_DYNAMIC)
            for resource in _all(dynamic, _DYNAMIC_RESOURCES)
            for one in _claimed(resource)
        ]
        if ids:
            by_pod[namespace, name] = [*dict.fromkeys(ids)]
    return by_pod


def _claimed(resource: bytes) -> Iterator[str]:
    """The device that a claim has from one driver."""
    driver = _text(resource, _RESOURCE_DRIVER)
    names = [_text(one, _CDI_NAME) for one in _all(resource, _RESOURCE_CDI)]
    # Before Kubernetes 1.31, kubelet names no driver: the CDI names begin with one.
    owners = [driver] if driver else [name.partition("/")[0] for name in names]
    if not any(owner == one or owner.endswith(f".{one}") for owner in owners for one in DRIVERS):
        return
    uuids = [match[0] for name in names for match in [_UUID.search(name)] if match is not None]
    if uuids:
        yield from uuids
    elif driver:
        pool, device = _text(resource, _RESOURCE_POOL), _text(resource, _RESOURCE_DEVICE)
        yield f"{driver}/{pool}/{device}"
    else:
        yield from names


def _text(message: bytes, number: int) -> str:
    return next(_all(message, number), b"").decode()


def _all(message: bytes, number: int) -> Iterator[bytes]:
    """The values of one field that has a length: texts and messages.

    Protocol Buffers' wire format is four kinds of fields; a library for it would be the largest
    part of this program.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind: Any = key & 7
        if kind == 0:
            _, at = _varint(message, at)
            continue
        length, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}.get(kind), at)
        if length is None or at + length > len(message):
            raise ValueError("its answer is not a list of pods")
        if kind == 2 and key >> 3 == number:
            yield message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count, byte in enumerate(message[at : at + 10], 1):
        value |= (byte & 0x7F) << (7 * (count - 1))
        if byte < 0x80:
            return value, at + count
    raise ValueError("its answer is not a list of pods")
