"""The page of energy by day and user: its content, and how a browser shows it."""

from __future__ import annotations

import random
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.browser import browser
from zeusctl.energy_page import page
from zeusctl.entities import UsedEnergy

BEGIN = datetime(2026, 11, 1, tzinfo=timezone.utc)
NASTY = '<script>alert("x")</script>'


def used(day: int, kind: str, name: str, joules: float, idle: float = 0.0) -> UsedEnergy:
    return UsedEnergy(
        since=BEGIN + timedelta(days=day),
        until=BEGIN + timedelta(days=day + 1),
        kind=kind,
        name="" if kind == "user" else name,
        gpu=None,
        limited=[],
        run=None,
        uid=None,
        user=name if kind == "user" else None,
        gpu_hours=joules / 1e6,
        energy_j=joules,
        lower_j=joules if kind != "container" else 0.0,
        upper_j=joules,
        active_j=joules - idle,
        idle_j=idle,
        basis=["equal" if kind == "container" else "allocated"],
        exact=kind != "container",
        bounds="presence" if kind == "container" else "exact",
        reason="",
        begin=None,
        end=None,
        workload=None,
    )


def month() -> tuple[list[UsedEnergy], list[UsedEnergy], list[UsedEnergy]]:
    rng = random.Random(1)
    users = ["alice", "bob", NASTY, *(f"user{number}" for number in range(12))]
    days = []
    for day in range(30):
        days += [
            used(day, "user", name, rng.uniform(0, 3e8) / (at + 1)) for at, name in enumerate(users)
        ]
        days += [used(day, "idle", "", 6e7, 6e7), used(day, "unattributed", "down", 1e6)]
        days.append(used(day, "container", "0123456789ab", 3e7))
    totals: dict[tuple[str, str], float] = {}
    for one in days:
        key = one.kind, one.user or one.name
        totals[key] = totals.get(key, 0.0) + one.energy_j
    jobs = [used(0, "job", str(number), 1e8, number * 1e6) for number in range(40)]
    return days, [used(0, *key, joules) for key, joules in totals.items()], jobs


def test_the_page_has_every_user_and_the_jobs_that_waste_most() -> None:
    days, users, jobs = month()
    text = page(days, users, jobs, "Energy of GPUs", sum(one.energy_j for one in days))
    assert "<script" not in text
    assert "http" not in text  # it requests nothing
    assert "&lt;script&gt;" in text
    total = sum(one.energy_j for one in days) / 3.6e6
    assert text.count(f"{total:,.2f} kWh") == 2
    for name in ("alice", "user11", "(idle)", "(unattributed: down)", "container 0123456789ab"):
        assert f"<td>{name}</td>" in text
    (estimate,) = re.findall("<tr><td>container.*?</tr>", text)
    assert "<td>presence</td>" in estimate
    assert "<td>equal</td>" in estimate
    assert "equal: several had processes and their use was not measured" in text
    assert "<td>job 39</td>" in text
    assert "<td>job 29</td>" not in text
    heights = [float(one) for one in re.findall(r'height="([0-9.]+)" fill', text)]
    assert all(height > 0 for height in heights)
    assert page([], [], [], "Nothing", 0.0).count("None.") == 2


@pytest.mark.needs("chromium")
def test_a_browser_shows_it_without_a_horizontal_scroll(tmp_path: Path) -> None:
    days, users, jobs = month()
    file = tmp_path / "energy.html"
    file.write_text(page(days, users, jobs, "Energy of GPUs", 1.0))
    with browser(tmp_path) as tab:
        tab.open(file.as_uri())
        for width in (1200, 400):
            tab.see(width, 900)
            assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.run("document.querySelectorAll('svg rect').length") > 30 * 8
        assert tab.run("document.title") == "Energy of GPUs"
        box = "document.querySelector('svg').getBoundingClientRect()"
        assert tab.run(f"{box}.height") > 50
        texts = "[...document.querySelectorAll('svg text')]"
        in_sight = f"{texts}.every(one => one.getBoundingClientRect().left >= {box}.left)"
        assert tab.run(in_sight)
        alice = [used(0, "user", "alice", 3.4e5)]
        file.write_text(page(alice, alice, [], "Joules", 3.4e5))
        tab.open(file.as_uri())
        assert tab.run(f"{texts}.some(one => one.textContent == '300,000')")
        assert tab.run(in_sight)
