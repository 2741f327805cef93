"""Selects the workload power profiles of a search."""

from __future__ import annotations

from collections.abc import Sequence

from zeus.device.gpu import GPU
from zeus.exceptions import ZeusArgumentError
from zeus_ipc.controls import profile_id


def to_search(gpus: Sequence[GPU], wanted: bool | Sequence[str]) -> list[int]:
    """Returns the numbers of the profiles to search: those that all GPUs offer, or the named ones.

    Args:
        gpus: The GPUs.
        wanted: All or none; or names, such as `max-q`.

    Raises:
        ZeusArgumentError: A GPU offers none, or not all of the named ones.
    """
    if not wanted:
        return []
    if isinstance(wanted, str):
        raise ZeusArgumentError(
            f"search_profiles must be True, False or a list of names: give [{wanted!r}]"
        )
    common: list[str] | None = None
    for gpu in gpus:
        offered = gpu.get_supported_power_profiles()
        if not offered:
            raise ZeusArgumentError(
                f"{gpu.get_name()} offers no workload power profiles, which NVIDIA's data-centre "
                "GPUs from Blackwell on have; leave search_profiles out"
            )
        common = offered if common is None else [name for name in common if name in offered]
    if not common:
        raise ZeusArgumentError(
            "these GPUs have no workload power profile in common; leave search_profiles out"
        )
    if wanted is True:
        return [number for name in common if (number := profile_id(name)) is not None]
    found = []
    for name in wanted:
        number = profile_id(name) if isinstance(name, str) else None
        if number is None or number not in map(profile_id, common):
            raise ZeusArgumentError(
                f"search_profiles names {name!r}, which these GPUs do not offer; there are "
                f"{', '.join(common)}"
            )
        found.append(number)
    return found
