"""The sources of jobs for `bso`: a database, or a server, with the same interface."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError

if TYPE_CHECKING:
    from zeus.optimizer.batch_size.store import Store


@contextmanager
def open_source(database: str | None, server: str | None) -> Iterator[Source]:
    """Opens the database, or the server if one is given.

    Raises:
        ZeusBSORuntimeError: It cannot be used.
    """
    if server is not None:
        yield _OnServer(server)
        return
    with open_database(database) as store:
        yield _InDatabase(store)


@contextmanager
def open_database(database: str | None) -> Iterator[Store]:
    """Opens a database that is there.

    Raises:
        ZeusBSORuntimeError: It cannot be used.
    """
    try:
        from zeus.optimizer.batch_size.database import url_of
        from zeus.optimizer.batch_size.store import Store
    except ModuleNotFoundError as error:
        raise ImportError(f"bso needs {error.name}: pip install 'zeusd[bso-server]'") from None

    name = database or "bso.db"
    file = url_of(name)
    if file.drivername == "sqlite" and not Path(file.database or "").is_file():
        # Opening it would create it.
        raise ZeusBSORuntimeError(
            f"there is no database {file.database}; name it with --db, or a server with --server",
        )
    store = Store(name)
    try:
        yield store
    finally:
        store.close()


class _InDatabase:
    """Jobs in a database, in the form of `server.views`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def jobs(self) -> list[dict[str, Any]]:
        from zeus.optimizer.batch_size.server import views

        now_s = time.time()
        return [views.summary(one, now_s) for one in self._store.overviews()]

    def job(self, job_id: str) -> dict[str, Any]:
        from zeus.optimizer.batch_size.server import views

        return views.detail(*self._store.overview(job_id), time.time())

    def delete(self, job_id: str) -> None:
        self._store.delete(job_id)

    def release(self, job_id: str) -> list[int]:
        return self._store.release(job_id)


class _OnServer:
    """The same, on a server."""

    def __init__(self, url: str) -> None:
        from zeus.optimizer.batch_size.http import TOKEN_ENV, HttpTrials

        token = os.environ.get(TOKEN_ENV) or os.environ.get("ZEUS_BSO_READ_TOKEN")
        self._server = HttpTrials(url, token)

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._server.ask("GET", "/jobs", "gpu_model")
        return found

    def job(self, job_id: str) -> dict[str, Any]:
        path = f"/jobs/{quote(job_id, safe='')}"
        found: dict[str, Any] = self._server.ask("GET", path, "trials")
        return found

    def delete(self, job_id: str) -> None:
        self._server.ask("DELETE", f"/jobs?job_id={quote(job_id, safe='')}")

    def release(self, job_id: str) -> list[int]:
        path = f"/jobs/{quote(job_id, safe='')}/release"
        found: list[int] = self._server.ask("POST", path, "released")["released"]
        return found


Source = _InDatabase | _OnServer
