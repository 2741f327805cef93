"""Checks of the optimizer's arguments: each error says what to give instead."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from zeus.device.gpu import GPU
from zeus.exceptions import ZeusArgumentError, ZeusGPUNotSupportedError
from zeus.optimizer.power_limit.settings import KINDS, Beside, VariantKind
from zeus.utils.warn import warn
from zeus_common.units import WATT_MW

MOST_NAMED = 20
"""Most values that an error names all."""

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


def check_selector(selector: Any) -> None:
    """Check an `OptimumSelector`.

    Raises:
        ZeusArgumentError: It is not one, such as a class.
    """
    if selector is not None and (isinstance(selector, type) or not hasattr(selector, "select")):
        of_class = isinstance(selector, type)
        instead = f"{selector.__name__}(...)" if of_class else "MaxSlowdownConstraint(1.1)"
        raise ZeusArgumentError(
            f"optimum_selector must be a selector, not {_text(selector)}: give {instead}"
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
    if pl_step >= WATT_MW:  # meant in milliwatts, probably
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


def _text(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else repr(given)


def to_search(kind: str, gpus: Sequence[GPU], wanted: bool | Sequence[Any]) -> list[Beside]:
    """Returns what to search beside limits of a kind: the default of what all GPUs offer, or what
    is named.

    Raises:
        ZeusArgumentError: A GPU offers none, or not all of what is named.
    """
    if not wanted or not gpus:
        return []
    of = KINDS[kind]
    if isinstance(wanted, str) or not isinstance(wanted, (bool, Iterable)):
        raise ZeusArgumentError(
            f"{of.argument} must be True, False or a list, not {_text(wanted)}: give [{wanted!r}]"
        )
    common = set.intersection(*(_offered(of, gpu) for gpu in gpus))
    if not common:
        raise ZeusArgumentError(
            f"these GPUs have no {of.plural} in common; leave {of.argument} out"
        )
    settings = list(of.default(sorted(common)))
    if wanted is not True:
        settings = [_parsed(of, one, common) for one in wanted]
    if of.descends:
        settings = sorted({*settings}, reverse=True)
    return [Beside(kind, one) for one in settings]


def _offered(kind: VariantKind, gpu: GPU) -> set[int]:
    settings: set[int] = set()
    with contextlib.suppress(ZeusGPUNotSupportedError):
        settings.update(kind.offered(gpu))
    if not settings:
        raise ZeusArgumentError(
            f"{gpu.get_name()} offers no {kind.plural}; leave {kind.argument} out"
        )
    return settings


def _parsed(kind: VariantKind, named: Any, common: set[int]) -> int:
    value = kind.parsed(named)
    if value is None or value not in common:
        shown = [str(kind.shown(one)) for one in sorted(common)]
        there = ", ".join(shown if len(shown) < MOST_NAMED else [shown[0], "...", shown[-1]])
        raise ZeusArgumentError(
            f"{kind.argument} names {named!r}, which these GPUs do not offer; there are {there}"
        )
    return value
