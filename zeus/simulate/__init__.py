"""Recurring jobs, simulated with measured training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.simulate.simulator import Simulator as Simulator

__all__ = ["Simulator"]

__getattr__ = lazily(__name__, {"Simulator": "simulator"})
