"""Jobs that profile themselves, and get their plans from that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support import wait_for
from tests.zeus.pipeline_frequency.server.conftest import Serve
from tests.zeus.pipeline_frequency.server.running import (
    job_body,
    ok,
    profile_body,
    rank_bodies,
    refused,
    register,
)
from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.plans import Frontier


def order_of(rank: dict[str, Any]) -> list[str]:
    """1F1B with two stages and four microbatches."""
    pairs = ["backward", "forward"]
    if rank["pp_rank"] == 0:
        return ["forward", "forward", *pairs, *pairs, "backward", "backward"]
    return ["forward", "backward"] * 4


def phase(http: Any, job_id: str) -> str:
    found: str = ok(http.get(f"/jobs/{job_id}"))["phase"]
    return found


def planned(http: Any, job_id: str) -> dict[str, Any]:
    """The job, once the planner has ended."""

    def ended() -> Any:
        found = ok(http.get(f"/jobs/{job_id}"))
        return (found["error"] or found["frontier"]) and found["phase"] != "planning" and found

    found: dict[str, Any] = wait_for(ended, "the planner to end")
    return found


def test_a_job_that_profiles_itself_gets_a_frontier(serve: Serve, tmp_path: Path) -> None:
    http = serve({"points": 10}, DUMP_DIR=tmp_path / "dump")
    job_id = register(http, 2)
    assert phase(http, job_id) == "profiling"
    empty = {"rank": 0, "frequencies": [], "version": 0}
    assert ok(http.get(f"/schedule/{job_id}?rank=0")) == empty
    report = {"rank": 0, "iteration": 1, "version": 0}
    assert ok(http.post(f"/progress/{job_id}", json=report))["frequencies"] is None
    for body in rank_bodies(2):
        assert phase(http, job_id) == "profiling"
        profile = profile_body(body, instructions=order_of(body))
        ok(http.post(f"/profile/{job_id}", json=profile))
        ok(http.post(f"/profile/{job_id}", json=profile))
    shown = planned(http, job_id)
    assert shown["error"] is None
    made = shown["frontier"]
    assert (made["schedule"], made["num_stages"], made["num_microbatches"]) == ("1f1b", 2, 4)
    assert made["p2p_power_w"] == 80.0
    assert shown["plan"] == len(made["plans"]) - 1
    update = ok(http.post(f"/progress/{job_id}", json=report))
    assert [name for name, _ in update["frequencies"]] == order_of(rank_bodies(2)[0])
    assert update["version"] == 1
    written = Frontier.read(tmp_path / "dump" / job_id)
    assert len(written.plans) == len(made["plans"])
    header = (tmp_path / "dump" / job_id / "profile.csv").read_text().splitlines()[0]
    assert header.startswith("rank,dp_rank,pp_rank,tp_rank,stage,instruction,frequency,time,energy")


def test_without_points_any_time_has_a_plan_as_good_as_one_that_is_made_for_it(
    serve: Serve, tmp_path: Path
) -> None:
    http = serve(DUMP_DIR=tmp_path / "dump")
    job_id = register(http)
    for body in rank_bodies():
        ok(http.post(f"/profile/{job_id}", json=profile_body(body, instructions=order_of(body))))
    assert planned(http, job_id)["error"] is None
    found = Frontier.read(tmp_path / "dump" / job_id)
    assert found.problem is not None
    planner = Planner.of(found.problem)
    assert found == planner.frontier()
    for factor in (1.01, 1.03, 1.1, 1.3):
        chosen = ok(http.post(f"/choose/{job_id}", json={"max_slowdown": factor}))
        made = planner.max_slowdown(factor).plans[0]
        assert found.plans[chosen["plan"]].energy_j <= 1.002 * made.energy_j


def test_a_profile_that_cannot_be_planned_is_reported(serve: Serve) -> None:
    http = serve()
    job_id = register(http, num_microbatches=3)
    for body in rank_bodies():
        ok(http.post(f"/profile/{job_id}", json=profile_body(body, instructions=order_of(body))))
    assert "another order" in planned(http, job_id)["error"]
    # The ranks learn it, too.
    report = {"rank": 1, "iteration": 3, "version": 0}
    update = ok(http.post(f"/progress/{job_id}", json=report))
    assert update["frequencies"] is None
    assert "another order" in update["note"]
    # Mended, and sent again.
    job_id = register(http)
    for body in rank_bodies():
        ok(http.post(f"/profile/{job_id}", json=profile_body(body)))
    assert "num_microbatches" in planned(http, job_id)["error"]
    for body in rank_bodies():
        ok(http.post(f"/profile/{job_id}", json=profile_body(body, instructions=order_of(body))))
    wait_for(lambda: ok(http.get(f"/jobs/{job_id}"))["frontier"], "plans after all")


def test_profiles_are_checked(serve: Serve, folder: str) -> None:
    http = serve()
    job_id = register(http)
    rank = rank_bodies()[0]
    moved = {**profile_body(rank), "pp_rank": 1}
    assert "another place" in refused(http.post(f"/profile/{job_id}", json=moved), 409)
    for wrong in ({"time": -1}, {"energy": float("nan")}, {"frequency": 0}):
        body = profile_body(rank)
        body["rows"][0].update(wrong)
        text = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        refused(http.post(f"/profile/{job_id}", content=text, headers=headers), 422)
    assert ok(http.get(f"/jobs/{job_id}"))["profiles"] == 0
    offered = {"rank": 1, "pp_rank": 1, "available_frequencies": [1410, 1200, 1005]}
    job_id = ok(http.post("/register_job", json=job_body()))
    ok(http.post(f"/register_rank/{job_id}", json={**rank, **offered}))
    other = profile_body({**rank, **offered})
    said = "rank 1 has measured 900 MHz, which it does not offer; it offers 3 clocks from 1005 to"
    assert said in refused(http.post(f"/profile/{job_id}", json=other), 422)
    fixed = serve({"solution_path": folder}, DATABASE=":memory:")
    job_id = register(fixed)
    sentence = refused(fixed.post(f"/profile/{job_id}", json=profile_body(rank)), 409)
    assert "FrontierSolution" in sentence
