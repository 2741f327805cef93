"""Who set a power limit."""

from __future__ import annotations

import pytest

from zeus_ipc.limited import BMC, BY_LEASE, SITE
from zeusd.core.bounds import author

LIMIT = 250_000
BELOW, SAME, ABOVE = LIMIT - 30_000, LIMIT + 400, LIMIT + 50_000


@pytest.mark.parametrize(
    ("enforced", "leased", "site", "ceiling", "found"),
    [
        (None, None, None, None, None),
        (LIMIT, ABOVE, ABOVE, ABOVE, None),
        (None, SAME, None, None, BY_LEASE),
        (LIMIT, SAME, ABOVE, ABOVE, BY_LEASE),
        (LIMIT - 400, SAME, SAME, None, SITE),
        (None, ABOVE, SAME, ABOVE, SITE),
        (LIMIT, SAME, ABOVE, SAME, "rack1"),
        (None, None, None, SAME, "rack1"),
        (BELOW, SAME, SAME, SAME, BMC),
        (BELOW, None, None, None, BMC),
    ],
)
def test_the_author_of_a_limit(
    enforced: int | None,
    leased: int | None,
    site: int | None,
    ceiling: int | None,
    found: str | None,
) -> None:
    ceilings = {} if ceiling is None else {"rack1": ceiling}
    assert author(LIMIT, enforced, leased, site, ceilings) == found


def test_the_lowest_of_several_ceilings_binds() -> None:
    assert author(LIMIT, LIMIT, ceilings={"job:1": ABOVE, "fleet": LIMIT}) == "fleet"
    # A limit above its bounds is someone else's.
    assert author(LIMIT, LIMIT, site_mw=BELOW, ceilings={"fleet": BELOW}) is None
    assert author(None, LIMIT, site_mw=LIMIT) is None
