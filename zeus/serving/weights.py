"""Stores weights of fits, so that a server's first requests need not wait for a new fit."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeus.utils.atomic import write_text

log = logging.getLogger(__name__)

VERSION = 2
"""Version of features and format; weights of another version are ignored."""


class WeightStore:
    """A JSON file of weights by GPU model, number of GPUs, model, and clock.

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, *key: str) -> dict[float, list[float]]:
        """The weights of a key by clock, MHz; empty if there are none or the file is unreadable."""
        found = self._read().get("|".join(key))
        try:
            weights = {float(mhz): [float(one) for one in row] for mhz, row in found.items()}  # type: ignore[attr-defined]  # anything may stand in the file
        except (AttributeError, TypeError, ValueError):
            return {}
        numbers = [one for row in weights.values() for one in row]
        sizes = {len(row) for row in weights.values()}
        return weights if all(map(math.isfinite, numbers)) and len(sizes) == 1 else {}

    def put(self, weights: Mapping[float, Sequence[float]], *key: str) -> None:
        """Stores weights. Logs if the file cannot be written."""
        known = self._read()
        known["|".join(key)] = {f"{mhz:g}": list(row) for mhz, row in weights.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps({"version": VERSION, "weights": known}) + "\n")
        except OSError as error:
            log.warning("weights cannot be written to %s: %s", self._path, error.strerror)

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict) or found.get("version") != VERSION:
            return {}
        weights = found.get("weights")
        return dict(weights) if isinstance(weights, dict) else {}
