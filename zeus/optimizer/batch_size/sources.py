"""The sources of jobs for `bso`: a database, or a server, with the same methods."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError

if TYPE_CHECKING:
    from zeus.optimizer.batch_size.http import HttpTrials
    from zeus.optimizer.batch_size.store import Store


@contextmanager
def open_source(database: str | None, server: str | None) -> Iterator[Store | HttpTrials]:
    """Opens the database, or the server if one is given.

    Raises:
        ZeusBSORuntimeError: It cannot be used.
    """
    if server is None:
        with open_database(database) as store:
            yield store
        return
    from zeus.optimizer.batch_size.http import TOKEN_ENV, HttpTrials

    token = os.environ.get(TOKEN_ENV) or os.environ.get("ZEUS_BSO_READ_TOKEN")
    with closing(HttpTrials(server, token)) as trials:
        yield trials


@contextmanager
def open_database(database: str | None, create: bool = False) -> Iterator[Store]:
    """Opens a database.

    Args:
        create: Whether it may be new.

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
    if not create and file.drivername == "sqlite" and not Path(file.database or "").is_file():
        raise ZeusBSORuntimeError(
            f"there is no database {file.database}; name it with --db, or a server with --server",
        )
    with closing(Store(name)) as store:
        yield store
