"""Who may say which job holds a GPU, and who may see whose energy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.zeusd.core.world import ADMIN, ALICE, BOB, GPU0, World, staffed
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import LedgerState, LedgerTotal, Metrics
from zeus_ipc.requests import Allocate
from zeusd.core.accounting import ABSENT
from zeusd.core.model import Failure
from zeusd.core.policy import LedgerAccess

READERS = frozenset({700})
DAY = [0, 86_400]
WRITES: list[tuple[str, dict[str, Any]]] = [
    ("allocate", {"gpus": [GPU0], "name": "7"}),
    ("deallocate", {"name": "7"}),
    ("forget_user", {"uid": 1003}),
]


@pytest.fixture
def world() -> World:
    return staffed()


@pytest.mark.parametrize(("op", "arguments"), WRITES)
def test_only_administrators_change_the_ledger(
    world: World, op: str, arguments: dict[str, Any]
) -> None:
    refused = world.call(ALICE, op, **arguments)
    assert refused["error"]["code"] == ErrorCode.PERMISSION_DENIED
    assert world.accounted == []
    assert "result" in world.call(ADMIN, op, **arguments)
    assert len(world.accounted) == 1


def test_only_gpus_that_are_here_are_allocated(world: World) -> None:
    reply = world.call(ADMIN, "allocate", gpus=[GPU0, "GPU-9"], name="7")
    assert reply["result"]["gpus"][GPU0] == {}
    assert reply["result"]["gpus"]["GPU-9"]["error"]["code"] == ErrorCode.UNKNOWN_GPU
    (effect,) = world.accounted
    assert isinstance(effect.request, Allocate)
    assert effect.request.gpus == [GPU0]


def test_a_ledger_that_fails_is_an_error_of_each_gpu_and_of_nothing_else(world: World) -> None:
    world.ledger = Failure(ErrorCode.LEDGER_FAILED, "the disk is full")
    assert world.code(ADMIN, "allocate", name="7") == ErrorCode.LEDGER_FAILED
    assert world.set_power(ALICE, 200) == {}
    world.ledger = ABSENT
    assert world.call(ALICE, "usage", edges=DAY)["error"]["code"] == ErrorCode.NOT_SUPPORTED


def test_a_user_reads_as_that_user_and_administrators_and_readers_as_everybody(
    world: World,
) -> None:
    def reader(conn: int) -> int | None:
        world.call(conn, "usage", edges=DAY)
        return world.accounted[-1].reader

    assert (reader(ALICE), reader(BOB), reader(ADMIN)) == (1002, 1003, None)
    world.connect(4, pid=104, uid=1004, groups=READERS)
    assert reader(4) == 1004
    for ledger, expected in (
        (LedgerAccess(gids=READERS), (1002, None)),
        (LedgerAccess(everybody=True), (None, None)),
    ):
        settings = replace(world.settings, ledger=ledger)
        world.apply(world.core.reconfigure(world.now_ns, settings))
        assert (reader(ALICE), reader(4)) == expected


def test_metrics_name_other_users_only_to_permitted_users(world: World) -> None:
    def total(kind: str, uid: int, amount: int) -> LedgerTotal:
        amounts = dict.fromkeys(("active_uj", "idle_uj", "lower_uj", "upper_uj"), amount)
        return LedgerTotal(kind=kind, name="", uid=uid, **amounts)

    totals = [total("user", 1002, 5), total("user", 1003, 7), total("namespace", -1, 11)]
    totals.append(total("idle", -1, 13))
    world.ledger_state = LedgerState(
        totals=totals, counted_uj={GPU0: 72}, held=[], damaged=[], dropped=0
    )

    def seen(conn: int) -> dict[tuple[str, int], int]:
        ledger = Metrics.model_validate(world.call(conn, "metrics")["result"]).ledger
        assert ledger is not None
        return {(one.kind, one.uid): one.active_uj for one in ledger.totals}

    assert seen(ALICE) == {("user", 1002): 5, ("others", -1): 18, ("idle", -1): 13}
    assert seen(BOB) == {("user", 1003): 7, ("others", -1): 16, ("idle", -1): 13}
    assert sum(seen(ADMIN).values()) == sum(seen(ALICE).values()) == 36
    assert ("others", -1) not in seen(ADMIN)


@pytest.mark.parametrize("name", ["", "a b", "../x", "-", "7;rm", "ä", "x" * 321])
def test_a_jobs_name_is_safe_for_terminals_and_paths(world: World, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        world.call(ADMIN, "allocate", gpus=[GPU0], name=name)
