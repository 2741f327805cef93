"""Turns and rates: one user's excess is that user's."""

from __future__ import annotations

import random
from collections import Counter

from tests import seeds
from zeusd.server.fairness import PENALTY_NS, Cost, Limits, Turns, UserShare

SECOND_NS = 1_000_000_000


class Peer:
    """A connection with messages to be read."""

    def __init__(self, name: str, user: UserShare[Peer], messages: float, size: int = 0) -> None:
        self.name = name
        self.user = user
        self.left = messages
        self.size = size


class Reading:
    """Reads peers and remembers in which order."""

    def __init__(self, cost: float = 1.0) -> None:
        self.order: list[str] = []
        self.cost = cost

    def __call__(self, peer: Peer) -> tuple[Cost, bool]:
        self.order.append(peer.name)
        peer.left -= 1
        return Cost(self.cost, peer.size), peer.left > 0


def added(turns: Turns[Peer], uid: int, name: str, messages: float, size: int = 0) -> Peer:
    user = turns.user(uid, 0)
    assert turns.admit(user, 0) is None
    peer = Peer(name, user, messages, size)
    turns.add(user, peer)
    return peer


def test_a_user_with_many_connections_gets_no_more_turns_than_one_with_one() -> None:
    turns: Turns[Peer] = Turns(Limits(handshakes=100))
    for number in range(100):
        added(turns, 1, f"flood{number}", float("inf"))
    added(turns, 2, "honest", 20)
    read = Reading()
    for _ in range(20):
        turns.run(0, read)
    count = Counter(name.rstrip("0123456789") for name in read.order)
    assert count["honest"] == count["flood"] == 20


def test_connections_of_one_user_take_turns() -> None:
    turns: Turns[Peer] = Turns(Limits())
    for name in "abc":
        added(turns, 1, name, float("inf"))
    read = Reading()
    for _ in range(12):
        turns.run(0, read)
    assert "".join(read.order) == "abcabcabcabc"


def test_an_expensive_request_takes_the_turns_of_cheap_ones() -> None:
    turns: Turns[Peer] = Turns(Limits())
    added(turns, 1, "dear", float("inf"))
    read = Reading(cost=8.0)
    turns.run(0, read)
    assert read.order == ["dear"]


def test_the_rate_is_kept_over_any_schedule() -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    turns: Turns[Peer] = Turns(Limits(requests_per_second=500.0))
    peer = added(turns, 1, "x", float("inf"))
    read, now_ns = Reading(), 0
    while now_ns < 10 * SECOND_NS:
        turns.run(now_ns, read)
        due_ns = turns.due_ns()
        now_ns = max(now_ns, due_ns) + rng.choice((0, 1_000, 1_000_000))
    assert 4_500 < len(read.order) <= 5_000 + 25 + 4
    assert peer.user.limited_ns > 5 * SECOND_NS


def test_bytes_count_as_well() -> None:
    turns: Turns[Peer] = Turns(Limits(bytes_per_second=100_000.0))
    added(turns, 1, "x", float("inf"), size=10_000)
    read = Reading(cost=0.25)
    for now_ns in range(0, 10 * SECOND_NS, 1_000_000):
        turns.run(now_ns, read)
    assert 90 < len(read.order) < 120


def test_a_user_that_waits_is_woken_in_time_and_no_sooner() -> None:
    turns: Turns[Peer] = Turns(Limits(requests_per_second=100.0))
    added(turns, 1, "x", float("inf"))
    read = Reading()
    while turns.due_ns() == 0:
        turns.run(0, read)
    due_ns, had = turns.due_ns(), len(read.order)
    turns.run(due_ns - 1, read)
    assert len(read.order) == had
    turns.run(due_ns, read)
    assert len(read.order) > had


def test_nothing_is_due_when_everything_is_read() -> None:
    turns: Turns[Peer] = Turns(Limits())
    added(turns, 1, "x", 2)
    read = Reading()
    turns.run(0, read)
    assert turns.due_ns() == 0
    turns.run(0, read)
    assert (read.order, turns.due_ns()) == (["x", "x"], None)


def test_connections_handshakes_and_their_rate_are_bounded() -> None:
    limits = Limits(connections=10, handshakes=4, accepts_per_second=1.0)
    turns: Turns[Peer] = Turns(limits)
    user = turns.user(1, 0)
    assert [turns.admit(user, 0) for _ in range(4)] == [None] * 4
    assert "handshake" in (turns.admit(user, 0) or "")
    user.handshakes = 0
    assert [turns.admit(user, 0) for _ in range(4)] == [None] * 4
    user.handshakes = 0
    assert [turns.admit(user, 0) for _ in range(2)] == [None] * 2
    assert "has 10 connections" in (turns.admit(user, 0) or "")
    user.connections = user.handshakes = 0
    assert "times a second" in (turns.admit(user, 0) or "")
    assert turns.admit(user, 2 * SECOND_NS) is None
    assert user.refused == 3


def test_a_user_who_keeps_violating_the_protocol_is_blocked_briefly_and_others_are_not() -> None:
    turns: Turns[Peer] = Turns(Limits())
    attacker, honest = turns.user(1, 0), turns.user(2, 0)
    for _ in range(7):
        turns.fault(attacker, 0)
    assert turns.admit(attacker, 0) is None, "a few may happen"
    turns.fault(attacker, 0)
    assert turns.admit(attacker, 1) is not None
    assert turns.admit(honest, 1) is None
    assert turns.admit(attacker, PENALTY_NS) is None
    for second in range(100):  # one a second never adds up
        turns.fault(honest, second * SECOND_NS)
        honest.connections = honest.handshakes = 0
        assert turns.admit(honest, second * SECOND_NS) is None


def test_users_without_connections_are_forgotten_when_there_are_many() -> None:
    turns: Turns[Peer] = Turns(Limits())
    kept = added(turns, 0, "kept", 1)
    for uid in range(1, 3000):
        turns.user(uid, uid * SECOND_NS)
    assert len(turns.users) < 1200
    assert turns.user(0, 3000 * SECOND_NS) is kept.user
