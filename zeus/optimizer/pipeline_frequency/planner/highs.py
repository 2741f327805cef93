"""HiGHS, which says nothing: what we print is ours."""

from __future__ import annotations

import importlib
from typing import Any


def silent(**options: Any) -> tuple[Any, Any]:
    """HiGHS's Python module, and a solver with these options.

    Raises:
        ImportError: highspy is not installed.
    """
    highspy: Any = importlib.import_module("highspy")
    # From 1.16 on, `Highs` prints a banner before it can have options; what it adds is not used.
    solver: Any = getattr(highspy, "_Highs", highspy.Highs)()
    for name, value in {"output_flag": False, "threads": 1, **options}.items():
        solver.setOptionValue(name, value)
    return highspy, solver
