"""The result of a search: a table, a sentence, a plot."""

from __future__ import annotations

import html
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus_common.atomic import replacing

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
        return self._error("energy") * (1 - self.saving)

    @property
    def slowdown_error(self) -> float:
        """Standard deviation of `slowdown`."""
        return self._error("time") * (1 + self.slowdown)

    def _error(self, of: str) -> float:
        """Standard deviation of the choice's ratio to the highest limit, as a fraction."""
        if self.chosen is None or self.chosen is self._highest:
            return 0.0
        ratio = float(getattr(self.chosen, f"{of}_ratio_error"))
        apart = [getattr(one, f"{of}_error") for one in (self.chosen, self._highest)]
        return ratio or math.hypot(*apart)

    @property
    def _highest(self) -> LimitEstimate:
        return self.estimates[0]

    def __str__(self) -> str:
        if not self.estimates:
            ended = f" {self._ending}" if self.reason else ""
            return f"No power limit has been measured yet.{ended}"
        beside = "" if self._plain else "   profile or clock"
        lines = [f"limit (W)   time (ms)       energy (J)        measured steps{beside}"]
        for one in self.estimates:
            time_ms, energy_j = one.time_s * 1000, one.energy_j
            lines.append(
                f"{one.power_limit_mw / 1000:9g} {time_ms:11.2f} ±{time_ms * one.time_error:6.2f} "
                f"{energy_j:11.3f} ±{energy_j * one.energy_error:6.3f} {one.steps:9}"
                + ("" if self._plain else f"        {one.beside or '-'}")
                + ("  <- chosen" if one is self.chosen else "")
            )
        return "\n".join([*lines, self.sentence])

    def _repr_html_(self) -> str:
        """Table and picture, for notebooks."""
        if not self.estimates:
            return f"<p>{html.escape(str(self))}</p>"
        rows = []
        for one in self.estimates:
            style = ' style="font-weight: bold"' if one is self.chosen else ""
            time_ms, energy_j = one.time_s * 1000, one.energy_j
            cells = (
                _name(one),
                f"{time_ms:.2f} ± {time_ms * one.time_error:.2f}",
                f"{energy_j:.3f} ± {energy_j * one.energy_error:.3f}",
                f"{one.steps}",
            )
            rows.append(f"<tr{style}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        names = ("limit (W)", "time (ms)", "energy (J)", "measured steps")
        head = "".join(f"<th>{name}</th>" for name in names)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        picture = io.StringIO()
        try:
            self.draw(picture)
        except ImportError:
            drawn = ""  # matplotlib is not installed; the table shows the same
        else:
            drawn = picture.getvalue()
            drawn = drawn[drawn.index("<svg") :]
        return f"{table}<p>{html.escape(self.sentence)}</p>{drawn}"

    @property
    def sentence(self) -> str:
        """Describes the choice and its saving, or why there is none, and the limit in force."""
        if self.chosen is None:
            return (
                f"No power limit is chosen after {self.steps} steps of the search. {self._ending}"
            )
        limit, highest = self.chosen.power_limit_mw / 1000, self._highest.power_limit_mw / 1000
        searched = f"the search took {self.steps} steps."
        if self.chosen is self._highest:
            why = f"stays, because {self.reason}" if self.reason else "is the best"
            return f"The highest limit, {limit:g} W, {why}; {searched} {self._in_force}"
        return (
            f"At {self.chosen} instead of {highest:g} W a step takes "
            f"{_change(-self.saving)} energy (±{self.saving_error:.1%}) and "
            f"{_change(self.slowdown)} time (±{self.slowdown_error:.1%}); {searched} "
            f"{self._in_force}"
        )

    @property
    def _plain(self) -> bool:
        """Whether only limits were measured."""
        return all(one.beside is None for one in self.estimates)

    @property
    def _ending(self) -> str:
        """Describes why the search has ended without a choice, and the limit in force."""
        ended = f"The search ended: {self.reason}. " if self.reason else ""
        return f"{ended}{self._in_force}"

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
        axes.errorbar(
            times,
            savings,
            xerr=[(100 + x) * e.time_error for e, x in zip(self.estimates, times, strict=True)],
            yerr=[(100 - y) * e.energy_error for e, y in zip(self.estimates, savings, strict=True)],
            fmt="o-" if self._plain else "o",
            color=_BLUE, ecolor="#b0bfd9", markersize=6, linewidth=1.2, capsize=2,
        )  # fmt: skip
        for one, x, y in zip(self.estimates, times, savings, strict=True):
            chosen = one is self.chosen
            axes.annotate(
                _name(one, " W"),
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
        axes.set_title(title or self.sentence.replace("; ", "\n"), fontsize=9, loc="left")
        axes.grid(alpha=0.3)
        axes.margins(x=0.12, y=0.12)
        if not isinstance(path, (str, Path)):
            figure.savefig(path, dpi=150, format="svg")
            return
        with replacing(Path(path)) as aside:
            figure.savefig(aside, dpi=150, format=Path(path).suffix[1:])


def _name(one: LimitEstimate, unit: str = "") -> str:
    limit = f"{one.power_limit_mw / 1000:g}{unit}"
    return limit if one.beside is None else f"{limit}, {one.beside}"


def _change(share: float) -> str:
    """`12.9 % less`, `12.9 % more`."""
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'}"
