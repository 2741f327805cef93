"""The tuner's report: a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from zeus.serving.clock_tune import POLICY, TuneRow


def table(rows: Sequence[TuneRow]) -> str:
    """The report as text."""
    lines = [
        f"{'tokens/s':>13} {'clock':>9} {'requests':>8} {'missed':>7} {'J/token':>8} "
        f"{'saving':>7} {'TTFT p99':>9} {'TPOT p99':>9}"
    ]
    for row in rows:
        low, high = row.tokens_per_s
        clock = "policy" if row.clock_mhz == POLICY else f"{row.clock_mhz} MHz"
        lines.append(
            f"{low:6.0f}-{high:<6.0f} {clock:>9} {row.requests:8} {row.late:7.2%} "
            f"{_number(row.joules_per_token, '.3f'):>8} {_number(row.saving, '.1%'):>7} "
            f"{1e3 * row.ttft_p99_s:6.0f} ms {1e3 * row.tpot_p99_s:6.1f} ms"
            f"{'  <- lowest that holds' if row.best else ''}"
        )
    return "\n".join(lines)


def picture(rows: Sequence[TuneRow], path: Path, ttft_s: float, tpot_s: float) -> None:
    """Plots J per token, TTFT and TPOT by clock, with a line for each load; the policy is a dashed
    line.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, title, limit in zip(
        panels,
        ("J per output token", "TTFT p99, ms", "TPOT p99, ms"),
        (None, 1e3 * ttft_s, 1e3 * tpot_s),
        strict=True,
    ):
        panel.set_title(title)
        panel.set_xlabel("clock, MHz")
        if limit is not None:
            panel.axhline(limit, color="0.4", linestyle=":", linewidth=1)
    for number, load in enumerate(dict.fromkeys(row.tokens_per_s for row in rows)):
        color = f"C{number % 10}"
        own = [row for row in rows if row.tokens_per_s == load]
        for panel, scale, name in zip(
            panels, (1, 1e3, 1e3), ("joules_per_token", "ttft_p99_s", "tpot_p99_s"), strict=True
        ):
            clocks = [row for row in own if row.clock_mhz != POLICY]
            panel.plot(
                [row.clock_mhz for row in clocks],
                [scale * getattr(row, name) for row in clocks],
                marker="o",
                color=color,
                label=f"{load[0]:.0f}-{load[1]:.0f} tokens/s",
            )
            for row in own:
                if row.clock_mhz == POLICY:
                    panel.axhline(scale * getattr(row, name), color=color, linestyle="--")
    panels[0].legend(fontsize="small")
    figure.savefig(path)


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
