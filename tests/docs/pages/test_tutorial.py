"""Follows the tutorial from its first command to its last."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages.following import DOCS, follow, shapes, shown_after
from tests.snippets import every
from tests.support import public_directory

PAGE = DOCS / "tutorial.md"
_RESULT = re.compile(r"^([\d.]+) s, (\d+) ± (\d+) J$", re.MULTILINE)


class Followed:
    """The results: the log of zeusd, and the output of each block of commands."""

    def __init__(self, folder: Path) -> None:
        self.printed = follow(PAGE, folder)
        self.log = [json.loads(line) for line in (folder / "zeusd.log").read_text().splitlines()]
        self._source = {block.line: block.source for block in every(PAGE)}

    def of(self, command: str) -> str:
        """The output of the block that begins with this text."""
        (found,) = (
            text for line, text in self.printed.items() if self._source[line].startswith(command)
        )
        return found


@pytest.fixture(scope="module")
def followed() -> Iterator[Followed]:
    with public_directory() as folder:  # pytest's own are too long for a socket's path
        yield Followed(folder)


def test_each_block_prints_what_the_page_shows(followed: Followed) -> None:
    shown = shown_after(PAGE)
    assert len(shown) >= 7
    for line, text in shown.items():
        # Beside other work the report may come while the choice is being set.
        report = re.sub(r"([\d.]+ W) is being set\.", r"In force: \1.", followed.printed[line])
        printed = shapes(report)
        for one in shapes(text):
            # Which limits the search tries, and how often, is another matter each time.
            if re.fullmatch(r"(N )+± N N ± N N( <- chosen)?|.*set xN .*|N set .*", one) is None:
                assert one in printed, f"{PAGE.name}:{line}: {one!r} is not in\n{printed}"


def test_a_lower_limit_costs_time_and_saves_energy(followed: Followed) -> None:
    (plain,) = _RESULT.findall(followed.of("python train.py"))
    (limited,) = _RESULT.findall(followed.of("zeusctl set 0 --power-limit 150"))
    # Beside other work a job may take any more time, but none takes less than its GPU's work.
    shown_s = float(_RESULT.findall(PAGE.read_text())[0][0])
    assert float(plain[0]) > 0.97 * shown_s
    assert float(limited[0]) > 1.05 * shown_s
    assert float(limited[1]) < 0.85 * float(plain[1])
    assert float(limited[1]) / float(limited[0]) < 150


def test_the_limit_of_a_killed_job_is_restored(followed: Followed) -> None:
    assert "125 W" in followed.of("python limited.py")
    assert "0 leases" in followed.of("kill -9")
    assert re.search(r"^ +0 .* 250 +250 ", followed.of("kill -9"), re.MULTILINE)
    assert "holder_gone" in followed.of("zeusctl audit")


def test_a_limit_is_chosen(followed: Followed) -> None:
    report = followed.of("python optimize.py")
    # Which one it is depends on how busy this machine is: the steps' time is real.
    assert re.search(r"^ +\d+ .*<- chosen$", report, re.MULTILINE)


def test_finally_everything_is_restored(followed: Followed) -> None:
    assert followed.log[-1]["event"] == "stopped"
    written = [one for one in followed.log if one.get("control") == "power_limit" and "new" in one]
    assert [one["new"] for one in written][-1] == "250 W"
