"""A PostgreSQL of the tests' own: Debian's, in a temporary directory, on a Unix socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import needs, preloaded
from tests.support import TIMEOUT_S, wait_for

_USER = "postgres"


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda one: one.parts[-3])
    return found[-1].parent if found else Path(needs.tool("postgresql")).parent


class PostgreSQL:
    """A cluster that runs."""

    def __init__(self, programs: Path, directory: Path, options: dict[str, Any]) -> None:
        self._programs = programs
        self._directory = directory
        self._options = options
        self._databases = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        settings = ["listen_addresses=", "fsync=off", "max_connections=300"]
        command = [str(self._programs / "postgres"), "-D", str(self._directory / "data")]
        command += ["-k", str(self._directory)]
        for setting in settings:
            command += ["-c", setting]
        with (self._directory / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **self._options)

        def ready() -> bool:
            assert process.poll() is None, (self._directory / "log").read_text()
            asked = [str(self._programs / "pg_isready"), "-q", "-h", str(self._directory)]
            return subprocess.run(asked).returncode == 0

        wait_for(ready, "PostgreSQL to answer")
        return process

    def new_database(self) -> str:
        """The URL of a new, empty database."""
        self._databases += 1
        name = f"bso{self._databases}"
        make = [str(self._programs / "createdb"), "-h", str(self._directory), "-U", _USER, name]
        subprocess.run(make, check=True)
        return f"postgresql://{_USER}@/{name}?host={self._directory}"

    def back_up(self, url: str, file: Path) -> None:
        """As `docs/train/batch_size_server.md` says."""
        subprocess.run([str(self._programs / "pg_dump"), "-Fc", "-f", str(file), url], check=True)

    def restore(self, url: str, file: Path) -> None:
        """As `docs/train/batch_size_server.md` says."""
        command = [str(self._programs / "pg_restore"), "--clean", "--if-exists", "-d", url]
        subprocess.run([*command, str(file)], check=True)

    def restart(self) -> None:
        """Ends all connections at once, and serves again."""
        self.stop()
        self.process = self._start()

    def stop(self) -> None:
        """Ends it."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(TIMEOUT_S)


@contextlib.contextmanager
def postgresql() -> Iterator[PostgreSQL]:
    """A new cluster."""
    programs = _programs()
    # It refuses to run as root.
    options: dict[str, Any] = {}
    if os.getuid() == 0:
        options = {"user": _USER, "group": _USER, "extra_groups": []}
    directory = Path(tempfile.mkdtemp(prefix="zeusd-pg-"))
    try:
        if options:
            shutil.chown(directory, _USER, _USER)
        _make(programs, directory / "data", options)
        cluster = PostgreSQL(programs, directory, {**options, "cwd": "/"})
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make(programs: Path, data: Path, options: dict[str, Any]) -> None:
    """Makes the data of a new cluster, by copying that of the test run's first cluster."""
    shared = os.environ.get(preloaded.SHARED)
    if shared is None:
        _initialize(programs, data, options)
        return
    first = Path(shared, "postgresql")
    with Path(shared, "postgresql.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not first.exists():
            _initialize(programs, data, options)
            _copy(data, first.with_suffix(".part"))
            first.with_suffix(".part").rename(first)
            return
    _copy(first, data)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)  # with its owner


def _initialize(programs: Path, data: Path, options: dict[str, Any]) -> None:
    made = subprocess.run(
        [str(programs / "initdb"), "-D", str(data), "-U", _USER]
        + ["--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"],
        capture_output=True,
        text=True,
        cwd="/",
        **options,
    )
    assert made.returncode == 0, made.stderr
