"""`bso serve` in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.serving import ServerProcess, environment
from tests.support import wait_for


class RunningServer(ServerProcess):
    """The server.

    Args:
        directory: Where it runs.
        database: Where it keeps what it keeps; None for its own choice.
        options: Of `bso serve`.
        settings: Of `ZEUS_BSO_`, without that.
    """

    def __init__(
        self, directory: Path, database: str | None, *options: str, **settings: str
    ) -> None:
        chosen = [] if database is None else ["--db", database]
        arguments = ["-m", "zeus.optimizer.batch_size", "serve", *chosen, *options]
        self.workers = int(options[options.index("--workers") + 1]) if options else 0
        super().__init__(directory, arguments, environment("ZEUS_BSO_", settings))

    def wait_until_serving(self) -> None:
        """Waits until it answers, and every worker has started."""
        super().wait_until_serving()
        wait_for(lambda: self.log().count("startup complete") >= self.workers, "all workers")

    def worker_pids(self) -> list[int]:
        """The serving processes, without multiprocessing's resource tracker."""
        tasks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = []
        for pid in map(int, tasks.read_text().split()):
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found


@contextlib.contextmanager
def running_server(
    directory: Path, database: str | None = None, *options: str, **settings: str
) -> Iterator[RunningServer]:
    """A server that serves."""
    server = RunningServer(directory, database, *options, **settings)
    try:
        server.wait_until_serving()
        yield server
    finally:
        server.stop()
        server.http.close()
