"""The server's settings: environment variables that begin with `ZEUS_BSO_`."""

from __future__ import annotations

from pydantic import Field

from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError
from zeus.optimizer.batch_size.store import LEASE_S
from zeus.utils.settings import HttpSettings

PREFIX = "ZEUS_BSO_"
DATABASE = "bso.db"

_OF_COMPOSE = ("db_user", "db_password", "root_password", "server_port")
"""Variables in ml-energy/zeus's compose files that are not settings of the server."""

_OF_RUNS = ("run_id",)
"""The variable that names a training run, see `client`."""


class ServerSettings(HttpSettings):
    """The settings.

    Attributes:
        database_url: `postgresql://...`, `sqlite:///...`, or the path of a SQLite file.
        read_token: Requests that only read must send it, or `token`. Without it, anyone may read.
        lease_s: A trial is lost after this time without a message, s.
        reference_lease_s: The same for trials of ml-energy/zeus's clients, which send messages only
            at the end of an epoch, s.
        echo_sql: Whether SQL statements are logged.
        workers: Number of serving processes, here and elsewhere: they share PostgreSQL's
            connections.
    """

    prefix = PREFIX
    error = ZeusBSOConfigError
    others = (*_OF_COMPOSE, *_OF_RUNS)

    database_url: str = Field(default=DATABASE, min_length=1, repr=False)
    read_token: str = Field(default="", repr=False)
    lease_s: float = Field(default=LEASE_S, gt=0, allow_inf_nan=False)
    reference_lease_s: float = Field(default=86400.0, gt=0, allow_inf_nan=False)
    echo_sql: bool = False
    workers: int = Field(default=1, ge=1)
