"""An operator's commands, on a real etcd."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from zeus_fleet.commands import main

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

    url = run("status", "--etcd", f"http://{etcd}")
    assert url == (1, f"Error: http://{etcd} is not a member of etcd; give HOST:PORT\n")
    assert "127.0.0.1:99999 is not an address" in run("serve", "--listen", "127.0.0.1:99999")[1]
    assert "is not a member of etcd" in run("status", "--etcd", "etcd1:99999")[1]
    assert run("status") == (1, "Error: there is no budget yet; see zeus-fleet budget --help\n")
    assert run("watch", "--count", "1") == run("status")
    assert run("budget", "600")[0] == 1
    code, said = run("budget", "--file", str(file))
    assert code == 0
    assert "site: 700 W for 2 nodes, floors 400 W, reserve 150 W" in said
    assert "rack1: 400 W for 1 node, floors 200 W, reserve 0 W\n" in said
    assert run("budget", "600")[1].startswith("site: 600 W")
    code, said = run("budget", "500")
    assert code == 1
    assert "allow 550 W or remove nodes" in said
    assert run("budget")[1].startswith("site: 600 W")
    code, said = run("status", "--etcd", "127.0.0.1:1")
    assert code == 0, "one member of two does not answer"
    assert "no heartbeat" in said
    assert "of 600 W" in said

    kept = tmp_path / "records"
    code, said = run("watch", "--every", "0.1", "--count", "2", "--record", str(kept))
    assert code == 0
    assert "limit    600 W" in said
    assert "absent: a b" in said
    assert len(kept.read_text().splitlines()) == 2

    assert run("budget", "560", "--at", "17:00")[0] == 2
    tomorrow = f"{datetime.now() + timedelta(days=1):%Y-%m-%dT%H:%M}"
    code, said = run("budget", "560W", "--until", tomorrow, "--ramp", "1kW/min", "--name", "dr")
    assert code == 0
    assert said.startswith("site: 560 W")
    assert "outside of events: 600 W" in said
    assert "dr: 560 W from" in said
    assert ", 1000 W/min" in said
    assert run("budget", "540", "--at", "17:00", "--until", "20:00")[0] == 1
    (flat,) = run("budget", "590", "--until", tomorrow, "--name", "flat")[1].splitlines()[-1:]
    assert ("flat: 590 W from" in flat, "W/min" in flat) == (True, False), flat
    assert run("budget", "--cancel", "flat")[0] == 0
    code, said = run("budget", "560", "--at", "2026-01-01T17:00", "--until", "2026-01-01T20:00")
    assert (code, said) == (1, "Error: 2026-01-01T20:00 is over; give an end in the future\n")
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


class Signal:
    """An address with the requests of a grid's operator, set by the test."""

    def __init__(self) -> None:
        self.events: list[dict[str, str]] = []
        self.status = 200
        signal = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not signal.status:
                    self.wfile.write(b"nothing of HTTP\r\n\r\n")
                    return
                self.send_response(signal.status)
                self.end_headers()
                if signal.status == 200:
                    self.wfile.write(json.dumps({"events": signal.events}).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/events"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def signal() -> Iterator[Signal]:
    one = Signal()
    yield one
    one.server.shutdown()
    one.server.server_close()


def test_events_of_an_address_are_kept_while_it_has_them(
    etcd: str, prefix: str, tmp_path: Path, signal: Signal
) -> None:
    (tmp_path / "budget.toml").write_text(TABLE)

    def run(*arguments: str) -> str:
        return CliRunner().invoke(main, [*arguments, "--etcd", etcd, "--prefix", prefix]).output

    run("budget", "--file", str(tmp_path / "budget.toml"))
    hour = {"start": "2099-01-01T17:00:00+00:00", "end": "2099-01-01T18:00:00+00:00"}
    signal.events = [{"name": "evening", "limit": "580W", "ramp": "1kW/min", **hour}]
    assert run("follow", signal.url, "--once", "--label", "grid") == ""
    assert "grid/evening: 580 W from 2099-01-01" in run("budget")
    signal.status = 503
    said = run("follow", signal.url, "--once", "--label", "grid")
    assert said.startswith(f"Error: {signal.url} cannot be read: HTTP Error 503")
    assert "grid/evening" in run("budget"), "its events stay while it cannot be read"
    signal.status = 0
    said = run("follow", signal.url, "--once", "--label", "grid")
    assert said.startswith(f"Error: {signal.url} cannot be read: BadStatusLine")
    signal.status = 200
    signal.events = [{"name": "night", "limit": "10W", **hour}]
    assert "allow 550 W" in run("follow", signal.url, "--once", "--label", "grid")
    assert "grid/evening" in run("budget"), "an event that cannot be kept changes nothing"
    signal.events = [{"name": "x" * 2**20, "limit": "600W", **hour}]
    assert "has more than 1048576 bytes" in run("follow", signal.url, "--once")
    signal.events = []
    run("follow", signal.url, "--once", "--label", "other")
    assert "grid/evening" in run("budget"), "another source's"
    run("follow", signal.url, "--once", "--label", "grid")
    assert "grid/evening" not in run("budget"), "the source has cancelled it"
    assert run("budget").startswith("site: 700 W")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limit_w = 700", "nodes is missing"),
        ("limit_w = inf\n[nodes]\na = 1", "limit_w: inf W is not possible; give 0 W to 1 GW"),
        ("limit_w = 9\nreserv_w = 5\n[nodes]\na = 1", "no setting reserv_w; check"),
        (f"limit_w = 1{'0' * 400}\n[nodes]\na = 1", "W is not possible; give 0 W to 1 GW"),
        ("limit_w = 9\n[nodes]\na = 1\n[[domains]]\nlimit_w = 5", "no setting domains; check"),
        (f"limit_w = {'[' * 3000}", "budget.toml cannot be read as TOML"),
        ("limit_w = 'x'\n[nodes]\na = 1", "limit_w: 'x' is not a power; write 80kW"),
        (
            "limit_w = 9\nleaving = ['b']\n[nodes]\na = 1",
            "b is leaving, but has no floor; list it",
        ),
        ("limit_w = 9\nleaving = 'a1'\n[nodes]\na1 = 1", "leaving: Input should be a valid"),
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
