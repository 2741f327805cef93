"""An HTML page of energy by day and user, and of what was held idle; one file without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from zeusctl.columns import Column, Columns
from zeusctl.entities import UsedEnergy
from zeusctl.usage import OTHERS, Scale, by_day, columns_in, estimates

COLORS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5"),
)
REST = {OTHERS: "#9c6b4e", "(idle)": "#9498a0", "(unattributed)": "#d4d4d4"}

SHARE: Column[UsedEnergy] = Column(
    heading="IDLE SHARE",
    text=lambda one: f"{100 * one.idle_j / one.energy_j:.0f} %" if one.energy_j else "",
)
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 280, 70, 40

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1e23; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .3rem .6rem; text-align: right;
  border-bottom: 1px solid #dfe2e6; } td:first-child, th:first-child { text-align: left; }
.wide { overflow-x: auto; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
.key span { display: inline-block; margin-right: 1rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
.note { color: #59616b; }
@media (prefers-color-scheme: dark) { body { color: #e6e8eb; background: #16181c; }
  td, th { border-color: #353a41; } .note { color: #9aa3ad; } }
"""


def page(
    days: Sequence[UsedEnergy],
    users: Sequence[UsedEnergy],
    jobs: Sequence[UsedEnergy],
    title: str,
    metered_j: float,
) -> str:
    """Returns the page.

    Args:
        days: Sums by user, day by day.
        users: The same over all days.
        jobs: Sums by job, over all days.
        metered_j: The GPUs' counters for the same time.
    """
    # Accounts with a color of their own; the others share one.
    scale, stacks = Scale.of(users), by_day(days, 8)
    colors = dict(zip(stacks, COLORS, strict=False)) | REST
    columns = [*columns_in(scale)[1:], SHARE]
    idle = [job for job in jobs if job.kind in ("job", "pod") and job.idle_j]
    total, metered = (
        f"{joules / scale.joules:,.2f} {scale.unit}"
        for joules in (sum(user.energy_j for user in users), metered_j)
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{total} in all; the GPUs' counters say {metered}.</p>",
        f"<h2>By day, in {scale.unit}</h2>",
        _chart(stacks, colors, scale.joules),
        '<p class="key">',
        *(
            f'<span><i style="background:{colors[name]}"></i>{escape(name)}</span>'
            for name in stacks
        ),
        "</p><h2>By user</h2>",
        _table(columns, sorted(users, key=lambda one: -one.energy_j)),
        *(f'<p class="note">{escape(line)}</p>' for line in estimates(users)),
        "<h2>Jobs with the most idle energy</h2>",
        '<p class="note">What a GPU drew for a job while its driver reported it as idle.</p>',
        _table(columns, sorted(idle, key=lambda one: -one.idle_j)[:10]),
    ]
    return "\n".join(parts) + "\n"


def _chart(stacks: dict[str, dict[str, float]], colors: dict[str, str], unit_j: float) -> str:
    """Stacked bars, one for each day."""
    days = sorted({day for stack in stacks.values() for day in stack})
    sums = [sum(stack.get(day, 0.0) for stack in stacks.values()) for day in days]
    highest = max(sums, default=0.0) / unit_j or 1.0
    step = (WIDTH - LEFT) / max(1, len(days))
    scale = (HEIGHT - BOTTOM - 10) / highest
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Energy by day and user">']
    for amount, text in _grid(highest):
        y = HEIGHT - BOTTOM - amount * scale
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for place, day in enumerate(days):
        x, y = LEFT + step * place, HEIGHT - BOTTOM
        for name, stack in stacks.items():
            amount = stack.get(day, 0.0) / unit_j
            if amount > 0:
                y -= amount * scale
                parts.append(
                    f'<rect x="{x + step * 0.1:.1f}" y="{y:.2f}" width="{step * 0.8:.1f}" '
                    f'height="{amount * scale:.2f}" fill="{colors[name]}">'
                    f"<title>{day}, {escape(name)}: {amount:,.2f}</title></rect>"
                )
        if place % -(-len(days) // 12) == 0:
            parts.append(
                f'<text x="{x + step / 2:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
                f"{day[5:]}</text>"
            )
    return "".join([*parts, "</svg>"])


def _grid(highest: float) -> list[tuple[float, str]]:
    """Returns a few round amounts from 0 up to the highest, with their texts."""
    rough = highest / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(step)))
    count = math.floor(highest / step * (1 + 1e-9))
    return [(number * step, f"{number * step:,.{decimals}f}") for number in range(count + 1)]


def _table(columns: Columns[UsedEnergy], sums: Sequence[UsedEnergy]) -> str:
    if not sums:
        return '<p class="note">None.</p>'
    lines = ["".join(f"<th>{escape(column.heading)}</th>" for column in columns)]
    lines += ["".join(f"<td>{escape(column.cell(row))}</td>" for column in columns) for row in sums]
    return f"<div class=wide><table><tr>{'</tr><tr>'.join(lines)}</tr></table></div>"
