"""Servers for tests, ranks that talk to them, and frontiers to choose from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.serving import ServerProcess, environment
from tests.support import TIMEOUT_S, wait_for
from zeus.optimizer.pipeline_frequency.common import Choice, JobInfo, RankInfo
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan
from zeus.optimizer.pipeline_frequency.server.job import TrainingJob

APP = "zeus.optimizer.pipeline_frequency.server.router:app"
PLAN = """[
[('forward', 1410), ('forward', 1395), ('backward', 1380), ('backward', 1365)],
[('forward', 1200), ('backward', 1185), ('forward', 1170), ('backward', 1155)],
]
# Iteration 42 cost change: 0.02
"""


def frontier(plans: int = 20, stages: int = 2, microbatches: int = 2) -> Frontier:
    """One as the planner makes them: the fastest of 2 s, the slowest of 3 s."""
    made = []
    for n in range(plans):
        slow = 1 - n / max(1, plans - 1)
        time_s = 2 + slow
        energy_j = 4000 - 900 * slow + 500 * slow**2
        order = [("forward", 1410 - n)] * microbatches + [("backward", 1200 - n)] * microbatches
        made.append(
            Plan(
                tuple(
                    tuple((name, mhz - 5 * stage) for name, mhz in order) for stage in range(stages)
                ),
                time_s=time_s,
                energy_j=energy_j,
                effective_energy_j=energy_j - 500 * time_s,
                blocking_energy_j=300.0 + 50 * slow,
                bound_j=energy_j * (1 - 0.0004 - 0.0003 * (n % 3)),
            )
        )
    return Frontier(tuple(made), "gpipe", stages, microbatches, 80.0, 1, 2.0, 4700.0)


class RunningServer(ServerProcess):
    """uvicorn with the server, in its own process.

    Args:
        directory: Where it runs and keeps what it keeps.
        settings: Of `ZEUS_PFO_`, without that.
        options: Further ones of uvicorn.
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, str] | None = None, *options: str
    ) -> None:
        env = environment("ZEUS_PFO_", settings)
        super().__init__(directory, ["-m", "uvicorn", APP, *options], env)


@contextlib.contextmanager
def running_server(
    directory: Path, settings: Mapping[str, str] | None = None, *options: str
) -> Iterator[RunningServer]:
    """A server that serves."""
    server = RunningServer(directory, settings, *options)
    try:
        server.wait_until_serving()
        yield server
    finally:
        server.stop()
        server.http.close()


AUTOMATIC = Choice(automatic=True)
ITERATION_S = 0.2
"""Advances the clock of a server that has one of its own."""

Http = Any
"""An httpx.Client, or a test client."""


def job_body(dp: int = 1, pp: int = 2, tp: int = 1, **more: Any) -> dict[str, Any]:
    """The body that registers a job."""
    degrees = {"dp_degree": dp, "pp_degree": pp, "tp_degree": tp, "world_size": dp * pp * tp}
    return {"job_id": "", **degrees, **more}


def rank_bodies(dp: int = 1, pp: int = 2, tp: int = 1) -> list[dict[str, Any]]:
    """The bodies that register its ranks; stages change slowest."""
    places = [(p, d, t) for p in range(pp) for d in range(dp) for t in range(tp)]
    return [
        {
            "rank": n,
            "dp_rank": d,
            "pp_rank": p,
            "tp_rank": t,
            "available_frequencies": [1410, 1200, 1050, 900],
        }
        for n, (p, d, t) in enumerate(places)
    ]


def ok(response: httpx.Response) -> Any:
    """The JSON of an answer that must be good."""
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return response.json()


def register(http: Http, dp: int = 1, pp: int = 2, tp: int = 1, **more: Any) -> str:
    """A whole job, once its scheduler has given schedules or failed. Returns its id."""
    job_id: str = ok(http.post("/register_job", json=job_body(dp, pp, tp, **more)))
    for body in rank_bodies(dp, pp, tp):
        ok(http.post(f"/register_rank/{job_id}", json=body))
    http.get(f"/schedule/{job_id}?rank=0")
    return job_id


def training_job(
    dp: int, pp: int, plans: Frontier, choice: Choice = AUTOMATIC, now_s: float = 0.0
) -> TrainingJob:
    """A whole job that has its plans, without a server."""
    job = TrainingJob(JobInfo(**job_body(dp, pp)), now_s)
    for body in rank_bodies(dp, pp):
        job.register(RankInfo(**body))
    job.take_frontier(plans, choice, now_s)
    return job


class Training:
    """Ranks of a job that train: each takes plans and reports on request.

    Args:
        http: The server, which has the plans of `frontier()`; iterations take what they promise.
        dp: How many pipelines.
        late: How much longer iterations of a pipeline take, by dp_rank; may be changed.
        clock: The server's, where a test has replaced it; each iteration advances it. With the
            machine's clock, ranks go over to a plan after 2.5 s, in which a test only iterates.
    """

    def __init__(
        self,
        http: Http,
        dp: int,
        late: dict[int, float] | None = None,
        clock: Clock | None = None,
        **more: Any,
    ) -> None:
        self.clock = clock or Clock()
        self.http, self.frontier = http, frontier()
        self.job_id = job_id = register(http, dp, **more)
        self.bodies = bodies = rank_bodies(dp)
        self.late = late or {}
        self.iteration = 0
        self.ran: dict[int, list[tuple[int, int]]] = {body["rank"]: [] for body in bodies}
        self.frequencies: dict[int, Any] = {}
        self.version: dict[int, int] = {}
        self._pending: dict[int, dict[str, Any]] = {}
        for body in bodies:
            answer = ok(http.get(f"/schedule/{job_id}", params={"rank": body["rank"]}))
            self.frequencies[body["rank"]] = answer["frequencies"]
            self.version[body["rank"]] = answer["version"]

    def plan(self, rank: int) -> int:
        """Index of the plan that a rank runs."""
        stage = next(body["pp_rank"] for body in self.bodies if body["rank"] == rank)
        wanted = tuple((name, mhz) for name, mhz in self.frequencies[rank])
        return next(n for n, one in enumerate(self.frontier.plans) if one.stages[stage] == wanted)

    def step(self, count: int = 1) -> None:
        """So many iterations; after each, every rank reports."""
        for _ in range(count):
            for body in self.bodies:
                rank = body["rank"]
                pending = self._pending.get(rank)
                if pending and pending["at_iteration"] <= self.iteration:
                    self.frequencies[rank] = pending["frequencies"]
                    self.version[rank] = pending["version"]
                    del self._pending[rank]
                self.ran[rank].append((self.iteration, self.plan(rank)))
            self.iteration += 1
            self.clock.now_s += ITERATION_S
            for body in self.bodies:
                rank = body["rank"]
                time_s = self.frontier.plans[self.plan(rank)].time_s
                time_s *= self.late.get(body["dp_rank"], 1.0) * (1 - 0.02 * body["pp_rank"])
                report = {
                    "rank": rank,
                    "iteration": self.iteration,
                    "iter_times": [[self.iteration - 1, time_s]],
                    "version": self.version[rank],
                }
                update = ok(self.http.post(f"/progress/{self.job_id}", json=report))
                if update["frequencies"] is not None:
                    self._pending[rank] = update

    def step_until(self, plans: dict[int, set[int]]) -> None:
        """Iterates until the pipelines run these plans."""
        for _ in range(1000):
            if self.plans() == plans:
                return
            self.step()
        raise AssertionError(self.plans())

    def plans(self) -> dict[int, set[int]]:
        """By pipeline, the plans that its ranks run."""
        found: dict[int, set[int]] = {}
        for body in self.bodies:
            found.setdefault(body["dp_rank"], set()).add(self.plan(body["rank"]))
        return found

    @contextlib.contextmanager
    def in_background(self, pause_s: float = 0.05) -> Iterator[None]:
        """Trains on in a thread."""
        stop = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                while not stop.wait(pause_s):
                    self.step()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        assert not failed, failed


class Clock:
    """A clock that advances on request."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def asked(http: Http, job_id: str, *ranks: int) -> list[Future[httpx.Response]]:
    """Requests for the ranks' schedules, once the server lets them wait."""
    pool = ThreadPoolExecutor()
    found = [pool.submit(http.get, f"/schedule/{job_id}?rank={rank}") for rank in ranks]
    pool.shutdown(wait=False)
    wait_for(lambda: ok(http.get("/healthz"))["waiting"] == len(ranks), "them to wait")
    return found


def refused(response: Any, status: int) -> str:
    """The sentence of a refusal."""
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    detail: str = response.json()["detail"]
    assert isinstance(detail, str)
    assert "Traceback" not in detail
    return detail


def profile_body(rank: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A rank's measurements at four clocks."""
    rows = [
        {
            "instruction": name,
            "frequency": mhz,
            "time": work * (1 + rank["pp_rank"]) * 1410 / mhz,
            "energy": work * (1 + rank["pp_rank"]) * (120 + 280 * (mhz / 1410) ** 2),
        }
        for name, work in (("forward", 0.1), ("backward", 0.2))
        for mhz in (1410, 1200, 1050, 900)
    ]
    place = {name: rank[name] for name in ("rank", "dp_rank", "pp_rank", "tp_rank")}
    return {**place, "rows": rows, "p2p_power_w": 80.0, **more}
