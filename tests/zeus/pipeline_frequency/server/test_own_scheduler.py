"""Schedulers that others write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import snippets
from tests.zeus.pipeline_frequency.server.conftest import Serve
from tests.zeus.pipeline_frequency.server.running import ok, rank_bodies, refused, register

PLUG_IN = """
from zeus.optimizer.pipeline_frequency.common import FrequencySchedule, PFOServerSettings
from zeus.optimizer.pipeline_frequency.server.scheduler import FrequencyScheduler

class Descending(FrequencyScheduler):
    '''Halves the clock as long as that saves energy.'''

    def __init__(self, job_info, rank_infos, pfo_settings: PFOServerSettings, start: int):
        super().__init__(job_info, rank_infos, pfo_settings)
        self.start = start

    def _run(self):
        mhz, least = self.start, float("inf")
        while True:
            schedule = [("forward", mhz), ("backward", mhz)]
            results = yield [
                FrequencySchedule(rank=info.rank, frequencies=schedule)
                for info in reversed(self.rank_infos)
            ]
            assert [result.rank for result in results] == list(range(self.world_size))
            energy = sum(sum(result.iter_energy) for result in results)
            if energy >= least:
                return
            mhz, least = mhz // 2, energy

class Failing(FrequencyScheduler):
    def _run(self):
        raise KeyError("nothing in here")
        yield []

class Silent(FrequencyScheduler):
    def _run(self):
        yield []
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    name = f"plug_in_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def one_round(http: Any, job_id: str, joules: float, world: int = 2) -> list[int]:
    """All ranks get schedules and send results; the clocks they got."""
    clocks = [
        ok(http.get(f"/schedule/{job_id}?rank={rank}"))["frequencies"][0][1]
        for rank in range(world)
    ]
    for rank in range(world):
        result = {"rank": rank, "iter_time": [1.0], "iter_energy": [joules]}
        ok(http.post(f"/result/{job_id}", json=result))
    return clocks


def test_a_custom_scheduler_runs_round_by_round(serve: Serve, plug_in: str) -> None:
    http = serve({"start": 1600}, SCHEDULER=f"{plug_in}:Descending")
    job_id = register(http)
    assert "+Descending+" in job_id
    assert one_round(http, job_id, 9) == [1600, 1600]
    assert one_round(http, job_id, 8) == [800, 800]
    assert ok(http.get(f"/schedule/{job_id}?rank=0"))["frequencies"][0][1] == 400
    result = {"rank": 0, "iter_time": [1.0], "iter_energy": [8.5]}
    ok(http.post(f"/result/{job_id}", json=result))
    sentence = refused(http.get(f"/schedule/{job_id}?rank=0&timeout_s=0.05"), 504)
    assert "rank 1 had not sent results" in sentence
    assert ok(http.get(f"/schedule/{job_id}?rank=1"))["frequencies"][0][1] == 400
    ok(http.post(f"/result/{job_id}", json={**result, "rank": 1}))
    for _ in range(3):  # it has ended: its last schedule stays
        assert one_round(http, job_id, 8.5) == [400, 400]


def test_the_manuals_scheduler_runs(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[4] / "docs/train/pipeline_frequency_server.md"
    (block,) = snippets.of(page)
    (tmp_path / "mine_of_the_manual.py").write_text(block.source)
    monkeypatch.syspath_prepend(tmp_path)
    http = serve({"step": 2}, SCHEDULER="mine_of_the_manual:Descend3D")
    job_id = register(http, 2)
    assert one_round(http, job_id, 9, world=4) == [1410] * 4
    assert one_round(http, job_id, 8, world=4) == [1050] * 4
    assert one_round(http, job_id, 7, world=4) == [1050] * 4


def test_its_rounds_continue_after_a_restart(serve: Serve, plug_in: str, tmp_path: Path) -> None:
    settings = {"SCHEDULER": f"{plug_in}:Descending", "DATABASE": str(tmp_path / "d.sqlite")}
    http = serve({"start": 1600}, **settings)
    job_id = register(http)
    assert one_round(http, job_id, 9) == [1600, 1600]
    assert one_round(http, job_id, 8) == [800, 800]
    http.__exit__(None, None, None)
    again = serve({"start": 1600}, **settings)
    assert one_round(again, job_id, 7) == [400, 400]
    assert one_round(again, job_id, 9) == [200, 200]
    assert one_round(again, job_id, 9) == [200, 200]


def test_schedules_and_results_are_dumped(serve: Serve, plug_in: str, tmp_path: Path) -> None:
    http = serve({"start": 1600}, SCHEDULER=f"{plug_in}:Descending", DUMP_DIR=tmp_path / "here")
    job_id = register(http)
    one_round(http, job_id, 9)
    ok(http.get(f"/schedule/{job_id}?rank=0"))
    dumped = tmp_path / "here" / job_id
    schedule = [["forward", 1600], ["backward", 1600]]
    assert json.loads((dumped / "0.sched.json").read_text()) == [
        {"rank": rank, "frequencies": schedule} for rank in (0, 1)
    ]
    results = json.loads((dumped / "0.prof.json").read_text())
    assert [one["iter_energy"] for one in results] == [[9.0], [9.0]]
    assert json.loads((dumped / "ranks.json").read_text()) == rank_bodies()


@pytest.mark.parametrize(
    ("name", "words"),
    [("Failing", "KeyError: 'nothing in here'"), ("Silent", "no schedule for ranks 0, 1")],
)
def test_a_scheduler_that_fails_is_reported_in_one_sentence(
    serve: Serve, plug_in: str, name: str, words: str
) -> None:
    http = serve(SCHEDULER=f"{plug_in}:{name}")
    job_id = register(http)
    for rank in (0, 1, 0):
        assert words in refused(http.get(f"/schedule/{job_id}?rank={rank}"), 500)
