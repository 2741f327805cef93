"""The GPUs of each optimizer in this process: two on one GPU would overwrite each other's limits.
An optimizer whose training has begun keeps its GPUs until it ends. One that has only seen steps
keeps them until another claims them, as after an interrupted notebook cell.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Claim:
    owner: weakref.ref[object]
    firm: bool


_guard = threading.Lock()
_claims: dict[str, _Claim] = {}


def firmly_held(owner: object, gpus: Sequence[str]) -> bool:
    """Whether an optimizer other than `owner` is training on one of these GPUs.

    Args:
        owner: An optimizer.
        gpus: UUIDs.
    """
    return any(claim.firm for claim in _of_others(owner, gpus))


def claim(owner: object, gpus: Sequence[str], *, firm: bool, again: bool) -> bool:
    """Claims GPUs for an optimizer, as long as it exists. Returns whether that succeeded.

    Args:
        owner: The optimizer.
        gpus: UUIDs.
        firm: Whether training has begun and not ended.
        again: Whether it has claimed them before: then it does not take them from another.
    """
    with _guard:
        others = _of_others(owner, gpus)
        if others and (again or any(one.firm for one in others)):
            return False
        _claims.update(dict.fromkeys(gpus, _Claim(weakref.ref(owner), firm)))
        return True


def release(owner: object) -> None:
    """Ends the claims of an optimizer."""
    with _guard:
        for uuid in [uuid for uuid, one in _claims.items() if one.owner() in (owner, None)]:
            del _claims[uuid]


def _of_others(owner: object, gpus: Sequence[str]) -> list[_Claim]:
    def found() -> list[_Claim]:
        claims = [_claims[uuid] for uuid in gpus if uuid in _claims]
        return [one for one in claims if one.owner() not in (owner, None)]

    if found():
        gc.collect()  # an unreferenced one may still exist
    return found()
