"""The cost that trades energy against time."""

from __future__ import annotations

from zeus.compat import old_names


def zeus_cost(energy: float, time: float, eta_knob: float, max_power: float) -> float:
    """Energy-time cost in joules: `eta * energy + (1 - eta) * max_power * time`.

    Args:
        energy: Energy, J.
        time: Time, s.
        eta_knob: 1 counts energy only, 0 time only.
        max_power: Power that a second is worth, W: the maximum limits of all GPUs, added.

    Source: You, Chung, Chowdhury, "Zeus", NSDI 2023, equation 2.
    """
    return eta_knob * energy + (1 - eta_knob) * max_power * time


__getattr__ = old_names(__name__)
