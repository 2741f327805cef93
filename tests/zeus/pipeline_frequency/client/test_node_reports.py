"""Ranks of one node report in one request."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import wait_for
from tests.zeus.pipeline_frequency.client.fakes import FakeServer, Store
from zeus.optimizer.pipeline_frequency import connection, node_reports
from zeus.optimizer.pipeline_frequency.common import JobInfo, RankInfo
from zeus.optimizer.pipeline_frequency.connection import ServerConnection, StoreMeeting
from zeus.optimizer.pipeline_frequency.follower import Schedule
from zeus.optimizer.pipeline_frequency.node_reports import NodeReports

RANKS = 3


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In its own folder, whose name leaves room for that of a socket."""
    monkeypatch.setattr(connection, "REPORT_INTERVAL_S", 0.05)
    with tempfile.TemporaryDirectory(prefix="zeus") as folder:
        monkeypatch.setattr(node_reports.tempfile, "gettempdir", lambda: folder)
        yield


@pytest.fixture
def server() -> Iterator[FakeServer]:
    found = FakeServer()
    yield found
    found.stop()


class Rank:
    """A rank's link to the server, and the plans that came."""

    def __init__(self, server: FakeServer, rank: int, store: Store) -> None:
        self.plans: list[Schedule] = []
        self.version = 0
        degrees = {"dp_degree": 1, "pp_degree": RANKS, "tp_degree": 1, "world_size": RANKS}
        self.link = ServerConnection(
            server.url,
            JobInfo(**degrees),
            RankInfo(rank=rank, dp_rank=0, pp_rank=rank, tp_rank=0, available_frequencies=[]),
            lambda: [1410],
            StoreMeeting(store),
            self._take,
            lambda: (7, self.version),
        )
        self.link.start(0.0)

    def _take(self, schedule: Schedule) -> None:
        self.plans.append(schedule)
        self.version = schedule.version

    @property
    def leads(self) -> bool:
        node = self.link._node
        return node is not None and node.leads


@contextlib.contextmanager
def training(server: FakeServer) -> Iterator[list[Rank]]:
    store = Store()
    ranks = [Rank(server, number, store) for number in range(RANKS)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.link.stop()


def together(server: FakeServer, ranks: set[int]) -> Any:
    """Whether one request has had the reports of exactly these ranks."""
    return any(
        isinstance(body, list) and {one["rank"] for one in body} == ranks
        for body in server.of("progress")
    )


def test_one_rank_reports_for_all_and_each_gets_its_plan(server: FakeServer) -> None:
    with training(server) as ranks:
        wait_for(lambda: together(server, {0, 1, 2}), "one request with all reports")
        assert sum(rank.leads for rank in ranks) == 1
        server.update, server.version = [("forward", 900)], 1
        wait_for(lambda: all(rank.plans for rank in ranks), "the plan on every rank")
        assert {rank.plans[-1].steps for rank in ranks} == {(("forward", 900),)}


def test_another_rank_takes_over_when_the_leader_ends(server: FakeServer) -> None:
    with training(server) as ranks:
        wait_for(lambda: together(server, {0, 1, 2}), "one request with all reports")
        (first,) = [number for number, rank in enumerate(ranks) if rank.leads]
        ranks[first].link.stop()
        rest = {0, 1, 2} - {first}
        wait_for(lambda: together(server, rest), "one request with the others' reports")


def test_a_server_that_takes_one_report_at_a_time_gets_that(server: FakeServer) -> None:
    answer = server.answer

    def older(method: str, target: str, body: Any) -> tuple[int, Any]:
        if isinstance(body, list):
            return 422, {"detail": "value is not a valid dict"}
        return answer(method, target, body)

    server.answer = older
    with training(server) as ranks:
        wait_for(
            lambda: {one["rank"] for one in server.of("progress")} == {0, 1, 2}, "every rank's own"
        )
        assert all(rank.link._thread.is_alive() for rank in ranks)


def test_a_leader_that_hangs_delays_nobody(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process that it forked keeps its socket open."""
    monkeypatch.setattr(connection, "SILENT_S", 0.3)
    monkeypatch.setattr(connection, "READ_S", 1.0)
    with training(server) as ranks:
        wait_for(lambda: together(server, {0, 1, 2}), "one request with all reports")
        (leader,) = [rank for rank in ranks if rank.leads]
        stuck = threading.Event()
        leader.link._state = lambda: (stuck.wait(60), (7, 0))[1]
        others = {0, 1, 2} - {ranks.index(leader)}

        def alone() -> bool:
            single = [one for one in server.of("progress") if isinstance(one, dict)]
            return others <= {one["rank"] for one in single}

        try:
            wait_for(alone, "the others' own reports")
        finally:
            stuck.set()


def test_a_folder_that_others_can_open_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only this user may use"):
        NodeReports("job", folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="only this user may use"):
        NodeReports("job", tmp_path / "link")
