"""How `scripts/test` shares the tests out: what stays on one worker, and what begins first.

Only with pytest-xdist; a plain pytest runs everything in its usual order.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

FIRST = (
    "tests/system/test_systemd.py",
    "tests/system/test_package.py",
    "tests/system/test_containers.py",
)
"""Files that take long and cannot be parted: all of each is about one machine that booted."""

APART = (
    "tests/test_mutations.py",
    "tests/zeusd/core/test_schedules.py",
    "tests/system/test_measuring.py",
    "tests/system/test_whole_path.py",
    "tests/system/test_promises.py",
    "tests/system/test_quiesce.py",
    "tests/zeusd/test_restore.py",
)
"""Files whose tests share nothing and take long: each test goes to whichever worker is free. They
come last, those with the longest tests first, so that all workers end at about the same time."""


gc.disable()  # until all is collected: of what is imported nothing is garbage


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On each worker alike: the order in which tests are handed out."""
    if hasattr(config, "workerinput"):
        rank = {path: number for number, path in enumerate((*FIRST, None, *APART))}
        rest = rank[None]
        items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], rest))


def pytest_collection_finish() -> None:
    """What is there before the first test stays: nobody needs to look through it for garbage again,
    as frameworks have it done after each training.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay whole, as what their modules make is not to be made twice, but for `APART`.

    The groups of pytest-xdist 3.8 would do the same, had they not lost their effect with pytest
    9.2 (pytest-xdist's issue 1386).
    """
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return nodeid if path in APART else path

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # it would put those with the most tests first
    return Sharing(config, log)
