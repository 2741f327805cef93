"""A user without permissions cannot disturb others noticeably.

`benchmarks/reliability.py attack` runs the same attacks for longer, and measures latencies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks.adversary import ATTACKS
from benchmarks.attack import TTL_S, Honest, beside
from benchmarks.processes import Daemon
from benchmarks.reliability import attacked_site, fill_ledger

pytestmark = pytest.mark.needs("two users")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon, with a ledger of a year, that all attack in turn."""
    past = tmp_path_factory.mktemp("past")
    fill_ledger(past)
    with attacked_site(past) as running:
        yield running


@pytest.fixture(scope="module")
def honest(daemon: Daemon) -> Iterator[Honest]:
    """Honest users, whose leases must outlast all attacks."""
    # They lose a request among a hundred as well as among a thousand.
    with contextlib.closing(Honest(daemon, pause_s=0.04)) as users:
        yield users


@pytest.mark.parametrize(
    "name",
    # /etc/subuid of this machine says who owns subordinate uids.
    [name for name, one in ATTACKS.items() if name != "a busy loop" and not one.as_root],
)
def test_no_attack_makes_an_honest_user_lose_a_request_or_a_lease(
    daemon: Daemon, honest: Honest, name: str
) -> None:
    uid = 40_000 + list(ATTACKS).index(name)
    # A lease whose heartbeats are not read expires meanwhile.
    seen = beside(ATTACKS[name], honest, daemon, uid, 1.2 * TTL_S)
    assert seen.faults() == []
