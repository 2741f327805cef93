"""Permissions: the whole matrix, decided by the kernel's identity of a peer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.zeusd.core.world import GPU0, GPU1, World, facts
from zeus_ipc.controls import Control
from zeusd.core.access import Access, AllowRule

ZEUS, ADMINS = 500, 600
DEFAULT = Access(
    rules=(AllowRule(gids=frozenset({ZEUS})),), admin_gids=frozenset({ADMINS}), root="host"
)
SETS = {
    Control.POWER_LIMIT: [200_000],
    Control.GPU_CLOCKS: [300, 900],
    Control.MEMORY_CLOCKS: [300, 900],
    Control.PERSISTENCE_MODE: [1],
    Control.POWER_PROFILE: [1],
}
USERS = {
    "stranger": {"uid": 1000},
    "member": {"uid": 1001, "groups": frozenset({ZEUS, 7})},
    "admin": {"uid": 1002, "groups": frozenset({ADMINS})},
    "root": {"uid": 0},
    "root in a container": {"uid": 0, "on_host": False},
}


@pytest.mark.parametrize(("user", "control"), list(itertools.product(USERS, Control)))
def test_the_default_for_every_user_and_control(user: str, control: Control) -> None:
    world = World(access=DEFAULT)
    world.connect(1, **USERS[user])
    allowed = user in ("admin", "root") or (
        user == "member" and control is not Control.PERSISTENCE_MODE
    )
    found = world.code(1, "set", control=control.value, value=SETS[control])
    assert found == ("ok" if allowed else "permission_denied")
    assert world.code(1, "acquire", controls=[control.value]) == (
        "ok" if allowed else "permission_denied"
    )
    assert bool(world.writes) is allowed
    assert "result" in world.call(1, "policy"), "anyone may look at the rules"
    assert bool(world.events("refused")) is not allowed


@pytest.mark.parametrize(
    ("root", "on_host"), list(itertools.product(("host", "always", "never"), (0, 1)))
)
def test_root_is_an_administrator_where_the_site_says_so(root: str, on_host: int) -> None:
    world = World(access=Access(root=root))
    world.connect(1, uid=0, on_host=bool(on_host))
    allowed = root == "always" or (root == "host" and on_host)
    expected = "ok" if allowed else "permission_denied"
    assert world.code(1, "set", control="power_limit", value=[200_000]) == expected


def test_a_rule_is_for_its_gpus_controls_and_range() -> None:
    rule = AllowRule(
        uids=frozenset({1000}),
        gpus=(GPU0,),
        controls=frozenset({Control.POWER_LIMIT, Control.GPU_CLOCKS}),
        ranges={Control.POWER_LIMIT: (150_000, 250_000), Control.GPU_CLOCKS: (600, 1200)},
    )
    world = World(limits_mw=(300_000, 300_000), access=Access(rules=(rule,)))
    for watts, expected in ((149, "out_of_range"), (150, "ok"), (250, "ok"), (251, "out_of_range")):
        assert world.code(1, "set", control="power_limit", value=[watts * 1000]) == expected
    for low, high, expected in (
        (599, 900, "out_of_range"),
        (600, 1200, "ok"),
        (700, 1201, "out_of_range"),
    ):
        assert world.lock_clocks(1, low, high) == expected
    assert world.code(1, "reset", control="power_limit") == "ok", "back is always within"
    assert world.code(1, "set", GPU1, control="power_limit", value=[200_000]) == "permission_denied"
    assert world.code(1, "set", control="memory_clocks", value=[300, 900]) == "permission_denied"


def test_any_rule_that_covers_the_value_suffices() -> None:
    rules = (
        AllowRule(everyone=True, ranges={Control.POWER_LIMIT: (200_000, 300_000)}),
        AllowRule(uids=frozenset({1000}), ranges={Control.POWER_LIMIT: (100_000, 150_000)}),
    )
    world = World(access=Access(rules=rules))
    assert world.code(1, "set", control="power_limit", value=[120_000]) == "ok"
    assert world.code(1, "set", control="power_limit", value=[220_000]) == "ok"
    assert world.code(1, "set", control="power_limit", value=[180_000]) == "out_of_range"


def test_a_refusal_names_what_would_help() -> None:
    rules = (
        AllowRule(gids=frozenset({ZEUS}), group_names=("zeus",)),
        AllowRule(gids=frozenset({ADMINS}), group_names=("hpc",), gpus=("no-such-gpu",)),
    )
    world = World(access=Access(rules=rules))

    def refused(op: str, **arguments: Any) -> str:
        return str(world.result(1, op, **arguments)["error"]["message"])

    message = refused("set", control="power_limit", value=[200_000])
    assert message.endswith("; ask the administrator to add you to the group zeus")
    message = refused("set", control="persistence_mode", value=[1])
    assert "; only an administrator may" in message


def test_a_gpu_may_be_named_by_index_or_product() -> None:
    for pattern in ("0", "Test*", GPU0[:6] + "*"):
        world = World(access=Access(rules=(AllowRule(everyone=True, gpus=(pattern,)),)))
        assert world.code(1, "set", control="power_limit", value=[200_000]) == "ok"


def test_a_connection_follows_other_rules_and_a_gpu_that_is_another_by_now() -> None:
    world = World(access=Access(rules=(AllowRule(everyone=True, gpus=("0",)),)))
    assert world.code(1, "set", control="power_limit", value=[200_000]) == "ok"
    core, now_ns = world.core, world.now_ns
    world.apply(core.gpus_found(now_ns, "1.0", [facts(GPU0, 3)], world.driver))
    assert world.code(1, "set", control="power_limit", value=[210_000]) == "permission_denied"
    world.find_gpus()
    assert world.code(1, "set", control="power_limit", value=[210_000]) == "ok"
    world.apply(core.reconfigure(now_ns, replace(world.settings, access=Access())))
    assert world.code(1, "set", control="power_limit", value=[220_000]) == "permission_denied"
    assert world.limit_w() == 210


def test_only_computing_users_may_lease_a_gpu_if_the_site_requires_it() -> None:
    access = Access(
        rules=(AllowRule(everyone=True),),
        admin_gids=frozenset({ADMINS}),
        require_compute_process=True,
    )
    world = World(access=access)
    world.connect(2, uid=1001, groups=frozenset({ADMINS}))
    assert world.code(1, "set", control="power_limit", value=[200_000]) == "permission_denied"
    assert world.code(1, "acquire", controls=["power_limit"]) == "permission_denied"
    assert not world.writes
    world.compute_uids = frozenset({1000, 4})
    assert world.code(1, "set", control="power_limit", value=[200_000]) == "ok"
    world.compute_uids = frozenset()  # between two jobs of the same process
    assert world.code(1, "set", control="power_limit", value=[190_000]) == "ok", (
        "it holds the lease"
    )
    world.call(1, "release")
    assert world.code(1, "set", control="power_limit", value=[200_000]) == "permission_denied"
    assert world.set_power(2, 200) == {}


def test_the_loser_learns_the_process_only_of_its_own_user() -> None:
    world = World(access=DEFAULT)
    member = frozenset({ZEUS})
    world.connect(1, pid=4321, uid=1001, groups=member)
    world.connect(2, pid=4322, uid=1001, groups=member)
    world.connect(3, pid=4323, uid=1003, groups=member)
    world.connect(4, pid=4324, uid=1004, groups=frozenset({ADMINS}))
    world.set_power(1, 200)
    world.advance(3)
    own = world.set_power(2, 150)["error"]["message"]
    other = world.set_power(3, 150)["error"]["message"]
    assert "process 4321 of user 1001 for 3 s" in own
    assert "4321" not in other
    assert "user 1001 for 3 s" in other
    seen = {conn: world.call(conn, "leases")["result"]["leases"][0]["pid"] for conn in (1, 2, 3, 4)}
    assert seen == {1: 4321, 2: 4321, 3: None, 4: 4321}


def test_only_holder_and_administrator_end_a_lease() -> None:
    world = World(access=DEFAULT)
    world.connect(1, uid=1001, groups=frozenset({ZEUS}))
    world.connect(2, uid=1003, groups=frozenset({ZEUS}))
    world.connect(3, uid=1004, groups=frozenset({ADMINS}))
    world.set_power(1, 200)
    assert world.call(2, "release")["result"] == {"released": 0}
    assert world.call(2, "release", whose="all")["error"]["code"] == "permission_denied"
    assert world.call(2, "goodbye", client="")["result"] == {"released": 0}
    assert world.limit_w() == 200
    assert world.call(3, "release")["result"] == {"released": 0}
    assert world.call(3, "release", whose="all", gpus=[GPU0])["result"] == {"released": 1}
    assert world.limit_w() == 300
    answer = world.set_power(1, 200)["error"]
    assert answer["code"] == "lease_expired"
    assert "an administrator (user 1004) ended it" in answer["message"]


def test_writes_of_one_user_are_bounded_and_others_do_not_notice() -> None:
    access = Access(rules=(AllowRule(everyone=True),), writes_per_second=10)
    world = World(limits_mw=(300_000, 300_000), access=access)
    world.connect(2, pid=1, uid=1000)
    world.connect(3, uid=1001)
    codes = [
        world.code(1, "set", control="power_limit", value=[200_000 + step]) for step in range(30)
    ]
    assert codes == ["ok"] * 20 + ["overloaded"] * 10
    assert "error" in world.set_power(2, 150), "the bound is the user's, not the connection's"
    assert world.set_power(3, 150, GPU1) == {}
    world.advance(0.5)
    codes = [world.code(1, "set", control="power_limit", value=[200_000]) for _ in range(6)]
    assert codes == ["ok"] * 5 + ["overloaded"]


def test_refusals_are_logged_but_not_flooded() -> None:
    world = World(access=DEFAULT)
    for _ in range(500):
        world.code(1, "set", control="power_limit", value=[200_000])
    assert 1 <= len(world.events("refused")) <= 20


# ------------------------------------------------------------------------------- limits per user


def limited(**limits: float) -> World:
    rules = (AllowRule(everyone=True, controls=frozenset(Control)),)
    return World(limits_mw=(300_000, 300_000), access=Access(rules=rules, **limits))


def test_a_user_holds_at_most_so_many_leases_and_others_do_not_notice() -> None:
    world = limited(leases_per_user=2)
    for conn in range(1, 4):
        world.connect(conn, uid=1000)
    assert world.set_power(1, 200) == {}
    assert world.set_power(2, 200, GPU1) == {}
    assert world.set_power(1, 210) == {}, "a lease that is held goes on"
    error = world.result(3, "set", control="gpu_clocks", value=[300, 900])["error"]
    assert error["code"] == "overloaded"
    assert "holds 2 leases already" in error["message"]
    world.connect(9, uid=1001)
    assert world.lock_clocks(9, 300, 900) == "ok"


def test_a_user_whose_processes_lose_leases_and_never_look_gets_no_more() -> None:
    world = limited(losses_per_user=3)
    for conn in range(1, 4):
        world.connect(conn, uid=1000)
        assert world.set_power(conn, 200) == {}
        world.advance(20)  # it sleeps
    error = world.set_power(4, 200)["error"]
    assert error["code"] == "overloaded"
    assert "the loss of 3 leases" in error["message"]
    world.connect(9, uid=1001)
    assert world.set_power(9, 200) == {}
    world.call(9, "release")
    world.call(1, "release")  # now it knows
    assert world.set_power(4, 200) == {}


@pytest.mark.parametrize("op", ["acquire", "release"])
def test_acquires_and_releases_of_one_user_are_bounded_as_sets_are(op: str) -> None:
    world = limited(writes_per_second=5)
    world.connect(2, uid=1001)
    arguments = {"gpus": [GPU0], "controls": ["gpu_clocks"]}
    answers = [world.call(1, op, **arguments) for _ in range(20)]
    texts = [str(answer) for answer in answers]
    assert sum("overloaded" in text for text in texts) == 10
    assert "overloaded" not in str(world.call(2, op, gpus=[GPU1], controls=["gpu_clocks"]))
    world.advance(1)
    assert "overloaded" not in str(world.call(1, op, **arguments))
