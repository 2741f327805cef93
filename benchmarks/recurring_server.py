"""The batch size server under load: how long a decision takes, and what many clients are answered.

    python benchmarks/recurring_server.py decisions
    python benchmarks/recurring_server.py clients URL [--clients 160] [--jobs 8] [--rounds 3]

`decisions`: the time from asking for a batch size to having it, in a file on /dev/shm (no HTTP), of
jobs of 12 and 1,000 sizes, without and with 5,000 trials. `clients`: so many threads register,
begin trials and report at a server that runs (`bso serve --workers 4`), without any retry; counts
the statuses of all answers.
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
import threading
import time
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table
from sqlalchemy import insert, update

from zeus.optimizer.batch_size.common import JobSpecFromClient, TrainingResult
from zeus.optimizer.batch_size.store import Store
from zeus.optimizer.batch_size.tables import jobs, trials


def spec(name: str, sizes: list[int]) -> JobSpecFromClient:
    return JobSpecFromClient(
        job_id=name,
        job_id_prefix=name,
        batch_sizes=sizes,
        default_batch_size=sizes[len(sizes) // 3],
        max_power=300,
        number_of_gpus=1,
        gpu_model="A100",
        mab_seed=1,
    )


def seconds(size: int) -> float:
    """Of a run's 20 epochs."""
    return 20 * (1 + size / 1024) * (1 + 100 / size)


def decisions(sizes: int, before: int, count: int = 100) -> np.ndarray:
    """Wall and CPU time of so many decisions, ms, shape (2, count), after so many trials.

    The first decision reads all trials.
    """
    rng = random.Random(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = Store(f"{folder}/bso.db")
        of_job = (
            [2**n for n in range(3, 3 + sizes)] if sizes < 20 else [*range(8, 8 * sizes + 1, 8)]
        )
        store.register(spec("job", of_job))
        rows = []
        for number in range(1, before + 1):
            size = rng.choice(of_job)
            time_s = seconds(size) * rng.uniform(0.9, 1.1)
            row = {"job_id": "job", "key": str(number), "number": number, "batch_size": size}
            row |= {"began_s": 0.0, "heard_s": 0.0, "status": "ok", "end_order": number + 1}
            row |= {"converged": True, "stopped_by_cost": False, "epochs": 20, "time": time_s}
            row |= {"energy": 200 * time_s, "overhead_time": 0.0, "overhead_energy": 0.0}
            rows.append(row)

        def fill(connection: Any) -> None:
            connection.execute(insert(trials), rows)
            connection.execute(update(jobs).values(trials=before, changes=before + 1))

        if rows:
            store._database.write(fill)
        took = []
        for number in range(count):
            began = time.perf_counter(), time.process_time()
            trial = store.begin_trial("job", f"run {number}")
            ended = time.perf_counter(), time.process_time()
            took.append([1000 * (end - begin) for begin, end in zip(began, ended, strict=True)])
            time_s = seconds(trial.batch_size) * rng.uniform(0.9, 1.1)
            told = {"time": time_s, "energy": 200 * time_s, "metric": 1.0, "current_epoch": 20}
            which = trial.model_dump(include={"job_id", "batch_size", "trial_number"})
            store.report(TrainingResult(**which, **told))
        store.close()
    return np.array(took).T


def clients(url: str, count: int, number_of_jobs: int, rounds: int) -> collections.Counter[int]:
    """Statuses of all answers."""
    answers: collections.Counter[int] = collections.Counter()
    lock = threading.Lock()
    start = threading.Barrier(count)

    def client(number: int) -> None:
        name = f"job {number % number_of_jobs}"
        with httpx.Client(base_url=url, timeout=120) as http:

            def ask(method: str, path: str, body: Any = None) -> Any:
                answer = http.request(method, path, json=body)
                with lock:
                    answers[answer.status_code] += 1
                return answer.json() if answer.is_success else None

            start.wait()
            ask("POST", "/jobs", spec(name, [32, 64, 128, 256, 512]).model_dump())
            for _ in range(rounds):
                trial = ask("POST", f"/jobs/{name}/trials")
                if trial is None:
                    continue
                which = {key: trial[key] for key in ("job_id", "batch_size", "trial_number")}
                for epoch in range(1, 6):
                    used = {"time": 4.0 * epoch, "energy": 800.0 * epoch, "metric": 0.1}
                    used |= {"current_epoch": epoch, "metric": 0.9 if epoch == 5 else 0.1}
                    ask("POST", "/report", {**which, **used})

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("decisions")
    of_clients = what.add_parser("clients")
    of_clients.add_argument("url")
    of_clients.add_argument("--clients", type=int, default=160)
    of_clients.add_argument("--jobs", type=int, default=8)
    of_clients.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    console = Console()
    if args.what == "clients":
        began = time.perf_counter()
        answers = clients(args.url, args.clients, args.jobs, args.rounds)
        took = time.perf_counter() - began
        said = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
        console.print(f"{args.clients} clients, {took:.1f} s: {said}")
        return
    table = Table(title="one decision, ms")
    for column in ("sizes", "trials before", "first", "median", "p99", "CPU median", "CPU p99"):
        table.add_column(column, justify="right")
    for sizes, before in ((12, 0), (1000, 0), (12, 5000), (1000, 5000)):
        times = decisions(sizes, before)
        later = [f"{q:.1f}" for of in times for q in np.quantile(of[1:], (0.5, 0.99))]
        table.add_row(str(sizes), str(before), f"{times[0, 0]:.0f}", *later)
    console.print(table)


if __name__ == "__main__":
    main()
