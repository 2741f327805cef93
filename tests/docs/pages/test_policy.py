"""Each row of the page on policies is asked of zeusd's rules, under the file shown above it."""

from __future__ import annotations

import grp
import pwd
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.pages.following import DOCS
from tests.snippets import ROOT, every
from tests.zeusd.core import world as worlds
from tests.zeusd.core.world import GPU0, GPU1, World
from zeus_common import text
from zeus_ipc.requests import request_adapter
from zeusd import config
from zeusd.core.model import GpuFacts
from zeusd.runtime.reads import Reads

PAGE = DOCS / "operate" / "policy.md"
EXAMPLES = ROOT / "examples" / "policy"

_GROUPS = {"zeus": 50_100, "zeus-admin": 50_101, "students": 50_102}
_USERS: dict[str, dict[str, Any]] = {
    "alice": {"uid": 50_001, "groups": frozenset({50_100})},
    "bob": {"uid": 50_002},
    "sam": {"uid": 50_003, "groups": frozenset({50_102})},
    "opal": {"uid": 50_004, "groups": frozenset({50_101})},
    "root": {"uid": 0},
    "root in a pod": {"uid": 0, "on_host": False},
    "4242": {"uid": 4242, "on_host": False},
}


@dataclass(frozen=True)
class Row:
    """A request of a user under a policy, and the page's result.

    Attributes:
        line: On the page.
        policy: Title of the block above; empty: none.
    """

    line: int
    policy: str
    who: str
    wants: str
    gets: str


def _rows() -> list[Row]:
    rows = []
    policy = ""
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), start=1):
        title = re.match(r'```toml title="([^"]+)"', line)
        if title:
            policy = title[1]
        cells = [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[0] not in ("who", "---"):
            rows.append(Row(number, policy, cells[0], cells[1], cells[2]))
    return rows


def _policies() -> dict[str, str]:
    return {block.title: block.source for block in every(PAGE) if block.language == "toml"}


ROWS = _rows()
POLICIES = _policies()


def _known(kind: str, ids: dict[str, int]) -> Any:
    def look_up(name: str) -> SimpleNamespace:
        if name not in ids:
            raise KeyError(name)
        return SimpleNamespace(**{kind: ids[name]})

    return look_up


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the page's node under one of its policies."""
    uids = {name: user["uid"] for name, user in _USERS.items() if not name.isdigit()}
    monkeypatch.setattr(pwd, "getpwnam", _known("pw_uid", uids))
    monkeypatch.setattr(grp, "getgrnam", _known("gr_gid", _GROUPS))
    plain = worlds.facts

    def a40(*arguments: Any) -> Any:
        found = plain(*arguments)
        info = found.info.model_copy(update={"name": "NVIDIA A40"})
        return GpuFacts(info, found.values)

    monkeypatch.setattr(worlds, "facts", a40)

    def make(policy: str) -> World:
        path = tmp_path / "zeusd.toml"
        path.write_text(POLICIES[policy] if policy else "")
        settings = config.load(str(path)).settings()
        return World(settings.site, (300_000, 300_000), settings.access, settings.terms)

    return make


def _outcome(world: World, wants: str) -> str:
    gpu = GPU1 if "GPU 1" in wants else GPU0
    watts = re.match(r"(\d+) W on", wants)
    clocks = re.match(r"(\d+) to (\d+) MHz on", wants)
    arguments: dict[str, Any] = {}
    if watts:
        op, arguments = "set", {"control": "power_limit", "value": [int(watts[1]) * 1000]}
    elif clocks:
        value = [int(clocks[1]), int(clocks[2])]
        op, arguments = "set", {"control": "gpu_clocks", "value": value}
    elif wants.startswith("persistence mode"):
        op, arguments = "set", {"control": "persistence_mode", "value": [1]}
    elif wants.startswith("a reset of"):
        op = "restore"
    else:
        assert wants.startswith("the energy of"), wants
        # No rule applies to readings: they are answered outside the core (zeusd/runtime/reads.py).
        asked = {"v": 1, "id": 1, "op": "energy", "gpus": [gpu]}
        assert Reads.serves(request_adapter.validate_python(asked))
        return "done"
    reply = world.call(1, op, gpus=[gpu], **arguments)
    error = reply.get("error") or reply["result"]["gpus"][gpu].get("error")
    return str(error["code"]) if error else "done"


@pytest.mark.parametrize("row", ROWS, ids=[f"line{row.line}" for row in ROWS])
def test_each_user_gets_what_the_page_says(row: Row, site: Any) -> None:
    world: World = site(row.policy)
    name, _, computes = row.who.partition(", who computes on ")
    user = _USERS[name]
    world.connect(1, **user)
    if computes == "it":
        world.compute_uids = frozenset({user["uid"]})
    assert _outcome(world, row.wants) == row.gets


def test_every_policy_has_rows_of_both_kinds() -> None:
    for policy in ["", *POLICIES]:
        outcomes = {row.gets for row in ROWS if row.policy == policy}
        assert "done" in outcomes, policy
        assert outcomes & {"permission_denied", "out_of_range"}, policy


def test_a_cap_is_restored_after_a_job(site: Any) -> None:
    world: World = site("site_cap.toml")
    world.connect(1, **_USERS["alice"])
    assert _outcome(world, "200 W on GPU 0") == "done"
    world.call(1, "release")
    assert world.limit_w() == 250


def test_the_policies_are_the_files() -> None:
    assert {path.name: path.read_text() for path in EXAMPLES.iterdir()} == POLICIES


def test_the_refusals_are_reported(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As zeusctl prints them: zeusd's own say numbers of users, and UUIDs."""
    names = {user["uid"]: name for name, user in _USERS.items()}
    monkeypatch.setattr(text, "user_name", names.__getitem__)
    (shown,) = (block.source for block in every(PAGE) if block.language == "text")
    said = []
    for policy, name in (("", "bob"), ("students.toml", "sam")):
        world: World = site(policy)
        world.connect(1, **_USERS[name])
        message = world.set_power(1, 200)["error"]["message"]
        said.append(text.named(message, {worlds.GPU0: 0}))
    assert shown.splitlines() == said
