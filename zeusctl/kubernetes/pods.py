"""Reads a pod's request from its object in the Kubernetes API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

ANNOTATIONS = {"zeusd.dev/power-limit": 1000, "dynamo.nvidia.com/gpu-power-limit": 1000}
"""What a pod may ask for a power limit with: mW per unit of each. Of several, the lowest counts."""

CONDITION = "zeusd.dev/PowerLimit"
"""Type of the condition in a pod's status that names its limit in force."""

VENDORS = ("nvidia.com/", "amd.com/")
"""Prefixes of the resource names of GPU device plugins."""

_WATTS = re.compile(r"([0-9]{1,4})W?")
_STATIC = "kubernetes.io/config.mirror"
"""On the API's copy of a static pod: the uid by which kubelet and its control groups name it. No
user can add it to a pod that runs, unlike `config.hash`, which has the same value."""


class PodCondition(NamedTuple):
    """A condition of a pod.

    Attributes:
        status: "True": all GPUs of the pod are within its limit.
        reason: One word.
    """

    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of this node.

    Attributes:
        uid: The API's uid.
        job: The uid by which kubelet names its control group; it differs for static pods.
        asked: Its annotations for a power limit, and their values.
        running: Whether kubelet has started it.
        generation: Of its spec; None: this Kubernetes does not count it.
        condition: That of type `CONDITION`, as last seen; None: none, or of another generation.
    """

    uid: str
    job: str
    namespace: str
    name: str
    asked: tuple[tuple[str, str], ...] = ()
    resources: bool = False
    claims: bool = False
    running: bool = False
    ended: bool = False
    generation: int | None = None
    condition: PodCondition | None = None

    @property
    def asks(self) -> str:
        """The annotations, for a message."""
        return ", ".join(name for name, _ in self.asked)


def pod_of(body: Mapping[str, Any]) -> Pod:
    """Reads the object of a pod.

    Raises:
        KeyError: It has no name, namespace or uid.
    """
    metadata, spec = body["metadata"], body.get("spec") or {}
    annotations, status = metadata.get("annotations") or {}, body.get("status") or {}
    generation = metadata.get("generation") or None
    return Pod(
        uid=metadata["uid"],
        job=annotations.get(_STATIC) or metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        asked=tuple((name, annotations[name]) for name in ANNOTATIONS if name in annotations),
        resources=any(name.startswith(VENDORS) for name in _limits(spec)),
        claims=bool(spec.get("resourceClaims")),
        running=status.get("phase") == "Running",
        ended=status.get("phase") in ("Succeeded", "Failed"),
        generation=generation,
        condition=next(
            (
                PodCondition(one["status"], one.get("reason", ""), one.get("message", ""))
                for one in status.get("conditions") or ()
                if one["type"] == CONDITION
                and one.get("observedGeneration", generation) == generation
            ),
            None,
        ),
    )


def _limits(spec: Mapping[str, Any]) -> Iterator[str]:
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        yield from (container.get("resources") or {}).get("limits") or ()


def milliwatts(annotation: str, asked: str) -> int | None:
    """The power limit that an annotation asks for, mW; None: it is not a number of watts."""
    match = _WATTS.fullmatch(asked.strip())
    return None if match is None else int(match[1]) * ANNOTATIONS[annotation] or None
