"""Measures the cost of a progress report to the pipeline server.

    python benchmarks/pipeline_reports.py [--ranks 10000] [--seconds 10]

A server process holds one job with all its ranks and a frontier of 100 plans. This process reports
for them over persistent connections, as fast as the server answers. The figures are the server's
CPU time per report, and the number of ranks reporting once a second that keep one core busy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.zeus.pipeline_frequency.server.running import frontier, job_body, running_server

CONNECTIONS = 4
STAGES = 8
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Connection:
    """A connection that stays open, with as little work on this side as can be."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._file = self._socket.makefile("rb")

    def post(self, path: str, body: object) -> object:
        """Sends JSON; returns the answer's."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = self._file.readline()
        length = 0
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        answer = self._file.read(length)
        if b" 200 " not in status:
            raise SystemExit(f"{path}: {status!r} {answer!r}")
        return json.loads(answer)


def reports(ranks: int) -> Iterator[dict[str, object]]:
    """Reports of all ranks, an iteration a round, forever."""
    for iteration in itertools.count(1):
        times = [[iteration - 1, 2.0]]
        for rank in range(ranks):
            yield {"rank": rank, "iteration": iteration, "iter_times": times, "version": 1}


def measure(pid: int, port: int, path: str, ranks: int, seconds: float) -> float:
    """CPU seconds of the server for a rank's report."""
    connections = itertools.cycle([Connection(port) for _ in range(CONNECTIONS)])
    work = reports(ranks)
    for _ in range(50):
        next(connections).post(path, next(work))
    before, began, count = cpu_s(pid), time.monotonic(), 0
    while time.monotonic() - began < seconds:
        next(connections).post(path, next(work))
        count += 1
    return (cpu_s(pid) - before) / count


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    pipelines = arguments.ranks // STAGES
    ranks = pipelines * STAGES
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        frontier(100, STAGES, 16).write(folder / "plans")
        settings = {"SCHEDULER_ARGS": json.dumps({"solution_path": str(folder / "plans")})}
        server = stack.enter_context(running_server(folder, settings, "--no-access-log"))
        port, pid = server.port, server.process.pid
        connection = Connection(port)
        job_id = connection.post("/register_job", job_body(pipelines, STAGES))
        for rank in range(ranks):
            place = {"dp_rank": rank // STAGES, "pp_rank": rank % STAGES, "tp_rank": 0}
            body = {"rank": rank, **place, "available_frequencies": [1410]}
            connection.post(f"/register_rank/{job_id}", body)
        print(f"{ranks} ranks of one job")
        cost_s = measure(pid, port, f"/progress/{job_id}", ranks, arguments.seconds)
        print(f"{1e6 * cost_s:.0f} us a report, {1 / cost_s:,.0f} ranks a core")


if __name__ == "__main__":
    main()
