"""An HTML page of energy by day and user, and of what was held idle; one file without scripts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from zeus_ipc.charging import Bounds, bounds_of, reason_of
from zeusctl.entities import UsedEnergy
from zeusctl.usage import KWH_FROM_J, KWH_J, NOBODYS, label

SHOWN = 8
"""Accounts with a color of their own; the others share one."""

COLORS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5"),
    *("#9c6b4e", "#9498a0", "#d4d4d4"),
)
REST, IDLE, UNKNOWN = "others", "(idle)", "(unattributed)"

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
    days: Sequence[UsedEnergy], jobs: Sequence[UsedEnergy], title: str, metered_j: float
) -> str:
    """Returns the page.

    Args:
        days: Sums by user, day by day.
        jobs: Sums by job, over all days.
        metered_j: The GPUs' counters for the same time.
    """
    total_j = sum(one.energy_j for one in days)
    factor, unit = (KWH_J, "kWh") if total_j >= KWH_FROM_J else (1, "J")
    users: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    methods: dict[str, dict[str, None]] = {}
    for one in days:
        name = _name(one)
        amounts = (one.gpu_hours, one.energy_j, one.idle_j, one.lower_j, one.upper_j)
        users[name] = [old + new for old, new in zip(users[name], amounts, strict=True)]
        methods.setdefault(name, {}).update(dict.fromkeys(one.basis))
    ranked = sorted(users, key=lambda name: -users[name][1])
    shown = [name for name in ranked if name not in (IDLE, UNKNOWN)][:SHOWN]
    colors = dict(zip([*shown, REST, IDLE, UNKNOWN], _colors(len(shown)), strict=True))
    wasted = sorted(
        (one for one in jobs if one.kind in ("job", "pod")), key=lambda one: -one.idle_j
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{total_j / factor:,.2f} {unit} in all; the GPUs' counters say "
        f"{metered_j / factor:,.2f} {unit}.</p>",
        f"<h2>By day, in {unit}</h2>",
        _chart(days, colors, factor),
        '<p class="key">',
        *(
            f'<span><i style="background:{color}"></i>{escape(name)}</span>'
            for name, color in colors.items()
            if name in users or (name == REST and len(ranked) > len(shown) + 2)
        ),
        "</p><h2>By user</h2>",
        _table(
            (
                *("user", "GPU-hours", f"energy, {unit}", "at least", "at most", "bounds"),
                *("idle", "idle share", "basis"),
            ),
            [
                (
                    name,
                    f"{users[name][0]:,.2f}",
                    f"{users[name][1] / factor:,.2f}",
                    *_bounds(users[name][3:], methods[name], factor),
                    f"{users[name][2] / factor:,.2f}",
                    _percent(users[name][2], users[name][1]),
                    ", ".join(methods[name]),
                )
                for name in ranked
            ],
        ),
        *(
            f'<p class="note">{escape(method)}: an estimate, as {escape(reason_of([method]))}; its '
            f"bounds follow from {bounds_of([method]).value}.</p>"
            for method in dict.fromkeys(method for some in methods.values() for method in some)
            if reason_of([method])
        ),
        "<h2>Jobs with the most idle energy</h2>",
        '<p class="note">What a GPU drew for a job while its driver reported it as idle.</p>',
        _table(
            ("job", "GPU-hours", f"energy, {unit}", "idle", "idle share"),
            [
                (
                    label(one, {}),
                    f"{one.gpu_hours:,.2f}",
                    f"{one.energy_j / factor:,.2f}",
                    f"{one.idle_j / factor:,.2f}",
                    _percent(one.idle_j, one.energy_j),
                )
                for one in wasted[:10]
                if one.idle_j
            ],
        ),
    ]
    return "\n".join(parts) + "\n"


def _name(one: UsedEnergy) -> str:
    if one.kind in NOBODYS:
        return IDLE if one.kind == "idle" else UNKNOWN
    return label(one, {})


def _bounds(limits: Sequence[float], methods: Iterable[str], factor: float) -> tuple[str, str, str]:
    kind = bounds_of(methods, meet=limits[0] == limits[1])
    if kind is Bounds.EXACT:
        return "", "", kind.value
    lower, upper = (f"{limit / factor:,.2f}" for limit in limits)
    return lower, upper, kind.value


def _colors(shown: int) -> tuple[str, ...]:
    return (*COLORS[:shown], *COLORS[SHOWN:])


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _chart(days: Sequence[UsedEnergy], colors: dict[str, str], factor: float) -> str:
    """Stacked bars, one for each day."""
    stacks: dict[str, dict[str, float]] = {}
    for one in days:
        stack = stacks.setdefault(one.since.strftime("%Y-%m-%d"), dict.fromkeys(colors, 0.0))
        name = _name(one)
        stack[name if name in colors else REST] += one.energy_j / factor
    highest = max((sum(stack.values()) for stack in stacks.values()), default=0.0) or 1.0
    step = (WIDTH - LEFT) / max(1, len(stacks))
    scale = (HEIGHT - BOTTOM - 10) / highest
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Energy by day and user">']
    for amount, text in _grid(highest):
        y = HEIGHT - BOTTOM - amount * scale
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    every = -(-len(stacks) // 12)
    for place, (day, stack) in enumerate(stacks.items()):
        x, y = LEFT + step * place, HEIGHT - BOTTOM
        for name, amount in stack.items():
            height = amount * scale
            if height > 0:
                y -= height
                parts.append(
                    f'<rect x="{x + step * 0.1:.1f}" y="{y:.2f}" width="{step * 0.8:.1f}" '
                    f'height="{height:.2f}" fill="{colors[name]}">'
                    f"<title>{day}, {escape(name)}: {amount:,.2f}</title></rect>"
                )
        if place % every == 0:
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


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return '<p class="note">None.</p>'
    lines = [
        "<div class=wide><table><tr>",
        *(f"<th>{escape(cell)}</th>" for cell in header),
        "</tr>",
    ]
    for row in rows:
        lines += ["<tr>", *(f"<td>{escape(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*lines, "</table></div>"])
