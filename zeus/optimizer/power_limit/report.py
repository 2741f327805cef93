"""What a search found: a table, a sentence, a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeus.optimizer.power_limit.estimates import Estimate

_BLUE, _GREEN = "#4c72b0", "#2a9d4a"


@dataclass(frozen=True)
class Report:
    """The time-energy trade-off of a job; `str` of it is text for people.

    Attributes:
        estimates: One a limit that was measured, descending; errors are one standard deviation.
        chosen: The choice; None: the search is not over, or was given up.
        steps: Training steps that the search took.
        reason: Why there is no choice, if the search has ended without.
        in_force_w: The limit that is set, W; None: none is.
    """

    estimates: tuple[Estimate, ...]
    chosen: Estimate | None
    steps: int
    reason: str = ""
    in_force_w: float | None = None

    @property
    def saving(self) -> float:
        """Share of a step's energy that the choice saves against the highest limit, or 0."""
        return 0.0 if self.chosen is None else 1 - self.chosen.energy_j / self._highest.energy_j

    @property
    def slowdown(self) -> float:
        """Share of a step's time that the choice adds to that at the highest limit, or 0."""
        return 0.0 if self.chosen is None else self.chosen.time_s / self._highest.time_s - 1

    @property
    def saving_error(self) -> float:
        """Standard deviation of `saving`."""
        if self.chosen is None or self.chosen is self._highest:
            return 0.0
        errors = math.hypot(self.chosen.energy_error, self._highest.energy_error)
        return errors * (1 - self.saving)

    @property
    def _highest(self) -> Estimate:
        return self.estimates[0]

    def __str__(self) -> str:
        if not self.estimates:
            return "No power limit has been measured yet."
        lines = ["limit (W)   time (ms)       energy (J)        measured steps"]
        for one in self.estimates:
            time_ms, energy_j = one.time_s * 1000, one.energy_j
            lines.append(
                f"{one.power_limit_mw / 1000:9g} {time_ms:11.2f} ±{time_ms * one.time_error:6.2f} "
                f"{energy_j:11.3f} ±{energy_j * one.energy_error:6.3f} {one.steps:9}"
                + ("  <- chosen" if one is self.chosen else "")
            )
        return "\n".join([*lines, self.sentence])

    @property
    def sentence(self) -> str:
        """The choice and what it saves, or why there is none."""
        if self.chosen is None:
            return f"No power limit is chosen after {self.steps} steps of the search."
        limit, highest = self.chosen.power_limit_mw / 1000, self._highest.power_limit_mw / 1000
        if self.chosen is self._highest:
            return f"The highest limit, {limit:g} W, is the best; {self.steps} steps were searched."
        return (
            f"At {limit:g} W instead of {highest:g} W a step takes {self.saving:.1%} less energy "
            f"(±{self.saving_error:.1%}) and {self.slowdown:+.1%} time; {self.steps} steps were "
            "searched."
        )

    def draw(self, path: str | Path) -> None:
        """Draws the trade-off; the suffix of the path says what: `.png`, `.svg`, `.pdf`.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: Nothing was measured.
            OSError: The file cannot be written.
        """
        if not self.estimates:
            raise ValueError("there is nothing to draw yet: no power limit has been measured")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError(
                "matplotlib is not installed; draw power limits after `pip install zeusd[plot]`"
            ) from None
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes: Any = figure.subplots()
        highest = self._highest
        times = [(one.time_s / highest.time_s - 1) * 100 for one in self.estimates]
        savings = [(1 - one.energy_j / highest.energy_j) * 100 for one in self.estimates]
        axes.errorbar(
            times,
            savings,
            xerr=[(100 + x) * e.time_error for e, x in zip(self.estimates, times, strict=True)],
            yerr=[(100 - y) * e.energy_error for e, y in zip(self.estimates, savings, strict=True)],
            fmt="o-", color=_BLUE, ecolor="#b0bfd9", markersize=6, linewidth=1.2, capsize=2,
        )  # fmt: skip
        for one, x, y in zip(self.estimates, times, savings, strict=True):
            chosen = one is self.chosen
            axes.annotate(
                f"{one.power_limit_mw / 1000:g} W",
                (x, y),
                textcoords="offset points",
                xytext=(8, -13),
                weight="bold" if chosen else "normal",
                color=_GREEN if chosen else "black",
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0},
            )
            if chosen:
                axes.plot([x], [y], "o", color=_GREEN, markersize=13, label="chosen", zorder=3)
                axes.legend(loc="best")
        axes.axhline(0, color="#999999", linewidth=0.8)
        axes.axvline(0, color="#999999", linewidth=0.8)
        axes.set_xlabel(f"time per step against {highest.power_limit_mw / 1000:g} W (%)")
        axes.set_ylabel("energy saved per step (%)")
        axes.set_title(self.sentence.replace("; ", "\n"), fontsize=9, loc="left")
        axes.grid(alpha=0.3)
        axes.margins(x=0.12, y=0.12)
        figure.savefig(path, dpi=150)
