"""Which optimizer of this process has which GPUs: two would undo each other's limits.

An optimizer that was told that training begins has its GPUs until that ends. One that was only
told of steps has them until another is: a notebook's cell that was interrupted leaves such.
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
    """Whether another than `owner` is in the middle of training on one of these GPUs.

    Args:
        owner: An optimizer.
        gpus: UUIDs.
    """
    return any(claim.firm for claim in _of_others(owner, gpus))


def claim(owner: object, gpus: Sequence[str], *, firm: bool, again: bool) -> bool:
    """Claims GPUs for an optimizer, as long as it lives. Returns whether it may have them.

    Args:
        owner: The optimizer.
        gpus: UUIDs.
        firm: Whether training is known to have begun, and not to have ended.
        again: Whether it has claimed them before: it does not take back what another has taken.
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
        gc.collect()  # one that nobody refers to any more may still be there
    return found()
