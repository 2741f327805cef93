"""What an operator does, on a real etcd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zeus_fleet.command import main

pytestmark = pytest.mark.needs("etcd")

TABLE = """
limit_w = 700
reserve_w = 150
leaving = ["b"]
[nodes]
a = 200
b = 200
[[domain]]
name = "rack1"
limit_w = 400
nodes = ["a"]
"""


def test_an_operator_sets_and_sees_the_budget(etcd: str, prefix: str, tmp_path: Path) -> None:
    file = tmp_path / "budget.toml"
    file.write_text(TABLE)

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, [*arguments, "--etcd", etcd, "--prefix", prefix])
        return done.exit_code, done.output

    assert run("status") == (1, "Error: there is no budget yet; see zeus-fleet budget --help\n")
    assert run("budget", "600")[0] == 1
    code, said = run("budget", "--file", str(file))
    assert code == 0
    assert "site: 700 W for 2 nodes, floors 400 W, reserve 150 W" in said
    assert "rack1: 400 W for 1 node," in said
    assert run("budget", "600")[1].startswith("site: 600 W")
    code, said = run("budget", "500")
    assert code == 1
    assert "allow 550 W or remove nodes" in said
    assert run("budget")[1].startswith("site: 600 W")
    code, said = run("status")
    assert code == 0
    assert "no heartbeat" in said
    assert "of 600 W" in said

    kept = tmp_path / "records"
    code, said = run("watch", "--every", "0.1", "--count", "2", "--record", str(kept))
    assert code == 0
    assert "limit    600 W" in said
    assert "absent: a b" in said
    assert len(kept.read_text().splitlines()) == 2

    assert run("budget", "560", "--at", "17:00")[0] == 2
    code, said = run("budget", "560W", "--until", "23:59:59", "--ramp", "1kW/min", "--name", "dr")
    assert code == 0
    assert said.startswith("site: 560 W")
    assert "outside of events: 600 W" in said
    assert "dr: 560 W from" in said
    assert run("budget", "540", "--at", "17:00", "--until", "20:00")[0] == 1
    assert run("budget", "650W")[1].startswith("site: 560 W")
    source = tmp_path / "signal.json"
    hour = {"start": "2099-01-01T17:00", "end": "2099-01-01T18:00"}
    source.write_text(json.dumps({"events": [{"name": "x", "limit": "580W", **hour}]}))
    assert run("follow", str(source), "--once")[0] == 0
    said = run("budget")[1]
    assert "signal/x: 580 W from 2099-01-01 17:00:00" in said
    assert "dr: 560 W" in said
    source.write_text("none")
    assert "not as documented" in run("follow", str(source), "--once")[1]
    assert "cannot be read" in run("follow", str(tmp_path / "no"), "--once")[1]
    assert "signal/x" in run("budget", "--file", str(file))[1], "events stay"
    assert run("budget", "--cancel", "other")[0] == 1
    assert run("budget", "--cancel", "dr")[1].startswith("site: 700 W")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limit_w = 700", "the budget has no nodes"),
        ("limit_w = 'x'\n[nodes]\na = 1", "wrong type"),
        ("limit_w = ", "budget.toml cannot be read as TOML"),
    ],
)
def test_a_file_that_is_no_budget_is_refused(
    etcd: str, prefix: str, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "budget.toml"
    file.write_text(text)
    arguments = ["budget", "--file", str(file), "--etcd", etcd, "--prefix", prefix]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert said in done.output
