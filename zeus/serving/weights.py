"""Weights of earlier fits, so that a server's first requests need not wait for a new one."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from zeus.utils.atomic import write_text

log = logging.getLogger(__name__)

VERSION = 1
"""Of the features: weights of another version are of no use."""


class WeightStore:
    """A JSON file of weights by GPU model, number of GPUs, engine and model.

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, *key: str) -> list[float] | None:
        """The weights of a key; None where there are none, or the file cannot be read."""
        found = self._read().get("|".join(key))
        if isinstance(found, list) and all(_is_number(one) for one in found):
            return [float(one) for one in found]
        return None

    def put(self, weights: Sequence[float], *key: str) -> None:
        """Keeps weights. That the file cannot be written is logged."""
        known = self._read()
        known["|".join(key)] = list(weights)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps({"version": VERSION, "weights": known}) + "\n")
        except OSError as error:
            log.warning("weights cannot be kept in %s: %s", self._path, error.strerror)

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict) or found.get("version") != VERSION:
            return {}
        weights = found.get("weights")
        return dict(weights) if isinstance(weights, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
