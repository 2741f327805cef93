"""The result of a search: a table, a sentence, a plot."""

from __future__ import annotations

import contextlib
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus_common.atomic import replacing
from zeus_common.text import percent

_BLUE, _GREEN = "#4c72b0", "#2a9d4a"


@dataclass(frozen=True)
class Report:
    """The time-energy trade-off of a job; `str` gives text.

    Attributes:
        estimates: One for each measured limit, descending; errors are one standard deviation.
        chosen: The choice; None: the search is not over, or was given up.
        steps: Training steps that the search took.
        reason: Why there is no choice, if the search has ended without one, or why it is the
            highest limit, if that is not the best measured one.
        in_force_w: The limit that is set, W; None: none.
        being_set_w: The limit that is being set, W, as while zeusd does not answer; None: none.
    """

    estimates: tuple[LimitEstimate, ...]
    chosen: LimitEstimate | None
    steps: int
    reason: str = ""
    in_force_w: float | None = None
    being_set_w: float | None = None

    @property
    def saving(self) -> float:
        """Share of a step's energy that the choice saves compared with the highest limit, or 0."""
        return 0.0 if self.chosen is None else 1 - self.chosen.energy_j / self._highest.energy_j

    @property
    def slowdown(self) -> float:
        """Share of a step's time that the choice adds compared with the highest limit, or 0."""
        return 0.0 if self.chosen is None else self.chosen.time_s / self._highest.time_s - 1

    @property
    def saving_error(self) -> float:
        """Standard deviation of `saving`."""
        return 0.0 if self.chosen is None else self.chosen.energy_ratio_error * (1 - self.saving)

    @property
    def slowdown_error(self) -> float:
        """Standard deviation of `slowdown`."""
        return 0.0 if self.chosen is None else self.chosen.time_ratio_error * (1 + self.slowdown)

    @property
    def _highest(self) -> LimitEstimate:
        return self.estimates[0]

    def __str__(self) -> str:
        if not self.estimates:
            return self.sentence
        lines = ["limit (W)   time (ms)       energy (J)        measured steps"]
        for one in self.estimates:
            time_ms, energy_j = one.time_s * 1000, one.energy_j
            lines.append(
                f"{one.power_limit_mw / 1000:9g} {time_ms:11.2f} ±{time_ms * one.time_error:6.2f} "
                f"{energy_j:11.3f} ±{energy_j * one.energy_error:6.3f} {one.steps:9}"
                + str(one.beside or "")
                + ("  <- chosen" if one is self.chosen else "")
            )
        return "\n".join([*lines, self.sentence])

    def _repr_html_(self) -> str:
        """Text and picture, for notebooks."""
        picture = io.StringIO()
        with contextlib.suppress(ImportError, ValueError):  # the text shows the same
            self.draw(picture)
        drawn = picture.getvalue()
        return f"<pre>{html.escape(str(self))}</pre>{drawn[drawn.find('<svg') :] if drawn else ''}"

    @property
    def sentence(self) -> str:
        """Describes the choice and its saving, or why there is none, and the limit in force."""
        if not self.estimates and not self.reason:
            return "No power limit has been measured yet."
        searched = f"the search took {self.steps} steps."
        if self.chosen is None:
            why = f" The search ended: {self.reason}." if self.reason else ""
            sentence = f"No power limit is chosen after {self.steps} steps of the search.{why}"
        elif self.chosen is self._highest:
            why = f"stays, because {self.reason}" if self.reason else "is the best"
            sentence = f"The highest limit, {self.chosen.setting}, {why}; {searched}"
        else:
            sentence = (
                f"At {self.chosen.setting} instead of {self._highest.setting} a step takes "
                f"{_change(-self.saving)} energy (±{percent(self.saving_error)}) and "
                f"{_change(self.slowdown)} time (±{percent(self.slowdown_error)}); {searched}"
            )
        return f"{sentence} {self._in_force}"

    @property
    def _in_force(self) -> str:
        if self.being_set_w is not None:
            return f"{self.being_set_w:g} W is being set."
        if self.in_force_w is None:
            return "This optimizer holds no limit now."
        return f"In force: {self.in_force_w:g} W."

    def draw(self, path: str | Path | IO[str], title: str = "") -> None:
        """Draws the trade-off; the extension selects the format: `.png`, `.svg`, `.pdf`. An open
        file gets SVG.

        Args:
            title: Instead of the sentence about the choice.

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
        errors = [(100 * one.time_error, 100 * one.energy_error) for one in self.estimates]
        xerr, yerr = zip(*errors, strict=True)
        axes.errorbar(times, savings, yerr, xerr, fmt="o", color=_BLUE, capsize=2)
        for one, x, y in zip(self.estimates, times, savings, strict=True):
            color = _GREEN if one is self.chosen else "black"
            axes.annotate(
                str(one.setting), (x, y), (8, -13), textcoords="offset points", color=color
            )
            if one is self.chosen:
                axes.plot([x], [y], "o", color=_GREEN, markersize=13, label="chosen", zorder=3)
                axes.legend(loc="best")
        axes.set_xlabel(f"time per step against {highest.setting} (%)")
        axes.set_ylabel("energy saved per step (%)")
        axes.set_title(title or self.sentence.replace("; ", "\n"), fontsize=9, loc="left")
        axes.grid(alpha=0.3)
        axes.margins(x=0.12, y=0.12)
        if not isinstance(path, (str, Path)):
            figure.savefig(path, dpi=150, format="svg")
            return
        with replacing(Path(path)) as aside:
            figure.savefig(aside, dpi=150, format=Path(path).suffix[1:])


def _change(share: float) -> str:
    """`12.9 % less`, `12.9 % more`."""
    return f"{percent(abs(share))} {'more' if share > 0 else 'less'}"
