"""Checks of the optimizer's arguments: each error says what to give instead."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from zeus.device.gpu import GPU
from zeus.exceptions import ZeusArgumentError, ZeusGPUNotSupportedError
from zeus.optimizer.power_limit.settings import Beside
from zeus.utils.warn import warn
from zeus_ipc.controls import profile_id

MILLIWATTS = 1000
"""A step of this many watts or more was probably meant in milliwatts."""

STEEP = 3.0
"""A slowdown of this factor or more was probably meant as a percentage."""


def check_monitor(monitor: Any) -> None:
    """Check that an optimizer was given a monitor of GPUs, if this process sees some.

    Raises:
        ZeusArgumentError: It was not.
    """
    if isinstance(monitor, type) or not hasattr(monitor, "gpu_indices"):
        raise ZeusArgumentError(
            f"monitor must be a ZeusMonitor, not {_text(monitor)}: give ZeusMonitor()"
        )
    if len(monitor.gpus) and not monitor.gpu_indices:
        raise ZeusArgumentError(
            "The monitor has no GPU, so there is no power limit to choose: give ZeusMonitor()"
        )


def check_selector(selector: Any, kind: type) -> None:
    """Check an `OptimumSelector`.

    Raises:
        ZeusArgumentError: It is not valid.
    """
    of_class = isinstance(selector, type)
    if selector is None or (not of_class and hasattr(selector, "select")):
        return
    if of_class and issubclass(selector, kind):
        example = "(1.1)" if selector.__name__ == "MaxSlowdownConstraint" else "(...)"
        raise ZeusArgumentError(
            f"optimum_selector must be a selector, not the class {selector.__name__}: give "
            f"{selector.__name__}{example}"
        )
    raise ZeusArgumentError(
        f"optimum_selector must be a selector such as MaxSlowdownConstraint(1.1), not "
        f"{_text(selector)}"
    )


def check_steps(wait_steps: Any, warmup_steps: Any, profile_steps: Any) -> None:
    """Check the numbers of steps.

    Raises:
        ZeusArgumentError: One is not a whole number, or is too small.
    """
    given = {"wait_steps": wait_steps, "warmup_steps": warmup_steps, "profile_steps": profile_steps}
    for name, steps in given.items():
        if isinstance(steps, bool) or not isinstance(steps, Integral):
            raise ZeusArgumentError(f"{name} must be a whole number of steps, not {_text(steps)}")
        least = 1 if name == "profile_steps" else 0
        if steps < least:
            raise ZeusArgumentError(f"{name} must be {'positive' if least else 'non-negative'}.")


def check_pl_step(pl_step: Any) -> None:
    """Checks the difference between limits, W.

    Raises:
        ZeusArgumentError: It is not a number of watts.
    """
    check_number("pl_step", pl_step, "a number of watts")
    if not pl_step > 0:
        raise ZeusArgumentError("pl_step must be positive.")
    if pl_step >= MILLIWATTS:
        raise ZeusArgumentError(
            f"did you mean {pl_step / 1000:g} W? pl_step is in watts, and {pl_step:g} W is more "
            "than any GPU's range"
        )


def check_profile_path(path: Path | None) -> None:
    """Make the folder of a profile, and check that it can be written.

    Raises:
        ZeusArgumentError: The path is a folder, or its folder cannot be made or written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ZeusArgumentError(f"profile_path {path} is a folder: give a file, as {path}/pl.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
                pass
    except OSError as error:
        raise ZeusArgumentError(
            f"The profile cannot be written to {path} ({error.strerror or error}); give another "
            "profile_path"
        ) from None


def check_number(name: str, given: Any, what: str) -> None:
    """Check an argument.

    Raises:
        ZeusArgumentError: It is not a number.
    """
    if not isinstance(given, Real) or isinstance(given, bool):
        raise ZeusArgumentError(f"{name} must be {what}, not {_text(given)}")


def check_factor(factor: Any) -> None:
    """Check the factor of `MaxSlowdownConstraint`; warns if it looks like a percentage.

    Raises:
        ZeusArgumentError: It is not a number, or below 1.
    """
    check_number("factor", factor, "a number such as 1.1")
    if not factor >= 1.0:  # nor is NaN
        raise ZeusArgumentError(
            f"max_slowdown_factor must be greater than or equal to 1.0. Got {factor}."
        )
    if factor >= STEEP:
        warn(
            f"MaxSlowdownConstraint({factor:g}) lets training take {factor:g} times as long; for "
            f"{factor:g} % more time give {1 + factor / 100:g}"
        )


def warn_of_step_after_end() -> None:
    """Warns that training continues without the optimizer."""
    warn(
        "A step began after the power limit optimizer had ended (on_train_end, close, or the end "
        "of its with block): limits are restored and nothing is measured. Call on_train_begin to "
        "train again, or end it later."
    )


def warn_of_no_step() -> None:
    """Warns that the optimizer was not told of any step."""
    warn(
        "Training has ended, and the power limit optimizer saw no step of it: iterate over "
        "plo.steps(loader), or call on_step_begin and on_step_end in each step."
    )


def _text(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else repr(given)


def profiles_to_search(gpus: Sequence[GPU], wanted: bool | Sequence[str]) -> list[Beside]:
    """Returns the workload power profiles to search: those that all GPUs offer, or the named ones.

    Raises:
        ZeusArgumentError: A GPU offers none, or not all of the named ones.
    """
    if not wanted or not gpus:
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
    found = []
    for name in common if wanted is True else wanted:
        number = profile_id(name) if isinstance(name, str) else None
        if number is None or number not in map(profile_id, common):
            raise ZeusArgumentError(
                f"search_profiles names {name!r}, which these GPUs do not offer; there are "
                f"{', '.join(common)}"
            )
        found.append(Beside("power_profile", number))
    return found


CLOCK_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Bounds of the graphics clock to search, of the highest."""


def clocks_to_search(gpus: Sequence[GPU], wanted: bool | Sequence[int]) -> list[Beside]:
    """Returns the bounds of the graphics clock to search, descending, of those that all GPUs take.

    Raises:
        ZeusArgumentError: They are no clocks, a GPU does not take one of them, or has none to lock.
    """
    if not wanted or not gpus:
        return []
    listed = isinstance(wanted, Iterable) and all(
        isinstance(one, Integral) and not isinstance(one, bool) for one in wanted
    )
    if not (listed or wanted is True):
        raise ZeusArgumentError(
            "search_clocks must be True, False or a list of whole numbers of MHz, such as "
            f"[1500, 1200], not {_text(wanted)}"
        )
    try:
        offered = [set(gpu.get_supported_graphics_clocks()) for gpu in gpus]
    except ZeusGPUNotSupportedError as error:
        raise ZeusArgumentError(f"{error.message}; leave search_clocks out") from None
    common = set.intersection(*offered)
    if not common:
        raise ZeusArgumentError("these GPUs have no clock in common; leave search_clocks out")
    if wanted is True:
        highest = max(common)
        clocks = {min(common, key=lambda one: abs(one - share * highest)) for share in CLOCK_SHARES}
    else:
        clocks = set(map(int, wanted))
        if odd := clocks - common:
            raise ZeusArgumentError(
                f"search_clocks names {min(odd)} MHz, which these GPUs do not offer; they have "
                f"{min(common)} to {max(common)} MHz, such as {sorted(common)[len(common) // 2]}"
            )
    return [Beside("graphics_clock", one) for one in sorted(clocks, reverse=True)]
