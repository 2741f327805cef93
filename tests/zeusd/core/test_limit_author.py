"""Who set a power limit."""

from __future__ import annotations

import itertools

import pytest

from zeus_ipc.limited import BMC, BY_LEASE, SITE
from zeusd.core.bounds import author

LIMIT = 250_000
BELOW, SAME, ABOVE = LIMIT - 30_000, LIMIT + 400, LIMIT + 50_000


@pytest.mark.parametrize(
    ("enforced", "leased", "site", "ceiling"),
    [*itertools.product((None, BELOW, LIMIT, LIMIT - 400), *[(None, SAME, ABOVE)] * 3)],
)
def test_the_author_of_a_limit(
    enforced: int | None, leased: int | None, site: int | None, ceiling: int | None
) -> None:
    found = author(LIMIT, enforced, leased, site, {} if ceiling is None else {"rack1": ceiling})
    if enforced == BELOW:
        assert found == BMC
    elif ceiling == SAME and site == SAME:
        assert found in (SITE, "rack1")
    elif ceiling == SAME:
        assert found == "rack1"
    elif site == SAME:
        assert found == SITE
    else:
        assert found == (BY_LEASE if leased == SAME else None)


def test_the_lowest_of_several_ceilings_binds() -> None:
    assert author(LIMIT, LIMIT, ceilings={"job:1": ABOVE, "fleet": LIMIT}) == "fleet"
    # A limit above its bounds is someone else's.
    assert author(LIMIT, LIMIT, site_mw=BELOW, ceilings={"fleet": BELOW}) is None
    assert author(None, LIMIT, site_mw=LIMIT) is None
