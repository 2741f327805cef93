"""Reads a pod's request from its object in the Kubernetes API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ANNOTATION = "zeusd.dev/power-limit"
"""On a pod: watts, such as "200"."""

VENDORS = ("nvidia.com/", "amd.com/")
"""Prefixes of the resource names of GPU device plugins."""

_WATTS = re.compile(r"([0-9]{1,4})W?")
_STATIC = "kubernetes.io/config.mirror"
"""On the API's copy of a static pod: the uid by which kubelet and its control groups name it. No
user can add it to a pod that runs, unlike `config.hash`, which has the same value."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this node.

    Attributes:
        uid: The API's uid.
        job: The uid by which kubelet names its control group; it differs for static pods.
        asked: The annotation; None: it has none.
    """

    uid: str
    job: str
    namespace: str
    name: str
    asked: str | None = None
    resources: bool = False
    claims: bool = False
    ended: bool = False


def pod_of(found: Mapping[str, Any]) -> Pod:
    """Reads the object of a pod.

    Raises:
        KeyError: It has no name, namespace or uid.
    """
    metadata, spec = found["metadata"], found.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    return Pod(
        uid=metadata["uid"],
        job=annotations.get(_STATIC) or metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        asked=annotations.get(ANNOTATION),
        resources=any(name.startswith(VENDORS) for name in _limits(spec)),
        claims=bool(spec.get("resourceClaims")),
        ended=(found.get("status") or {}).get("phase") in ("Succeeded", "Failed"),
    )


def _limits(spec: Mapping[str, Any]) -> Iterator[str]:
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        yield from (container.get("resources") or {}).get("limits") or ()


def milliwatts(asked: str) -> int | None:
    """The power limit that an annotation asks for, mW; None: it is not a number of watts."""
    found = _WATTS.fullmatch(asked.strip())
    return None if found is None or not int(found[1]) else int(found[1]) * 1000
