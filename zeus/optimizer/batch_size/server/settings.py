"""The server's settings: environment variables that begin with `ZEUS_BSO_`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError
from zeus.optimizer.batch_size.store import LEASE_S
from zeus.utils import settings

PREFIX = "ZEUS_BSO_"
DATABASE = "bso.db"

_OF_COMPOSE = ("db_user", "db_password", "root_password", "server_port")
"""Variables in ml-energy/zeus's compose files that are not settings of the server."""

_OF_RUNS = ("run_id",)
"""The variable that names a training run, see `client`."""


class ServerSettings(BaseModel):
    """The settings; each has a variable: its name in upper case after `ZEUS_BSO_`.

    Attributes:
        database_url: `postgresql://...`, `sqlite:///...`, or the path of a SQLite file.
        token: Requests that change something must send it as `Authorization: Bearer`.
        read_token: Requests that only read must send it, or `token`. Without it, anyone may read.
        lease_s: A trial is lost after this time without a message, s.
        reference_lease_s: The same for trials of ml-energy/zeus's clients, which send messages only
            at the end of an epoch, s.
        log_level: DEBUG (every request), INFO, WARNING, ERROR or CRITICAL.
        echo_sql: Whether SQL statements are logged.
        hosts: Other names by which browsers reach the server, such as a proxy's, with port if it is
            not the usual one: `NAME,NAME:PORT`.
        root_path: Prefix of its paths behind a proxy, such as `/plans`.
        workers: Number of serving processes, here and elsewhere: they share PostgreSQL's
            connections.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    database_url: str = Field(default=DATABASE, min_length=1, repr=False)
    token: str = Field(default="", repr=False)
    read_token: str = Field(default="", repr=False)
    lease_s: float = Field(default=LEASE_S, gt=0, allow_inf_nan=False)
    reference_lease_s: float = Field(default=86400.0, gt=0, allow_inf_nan=False)
    log_level: str = "INFO"
    echo_sql: bool = False
    workers: int = Field(default=1, ge=1)
    hosts: settings.Names = ()
    root_path: str = Field(default="", pattern="^(/[^/]+)*$")

    @field_validator("log_level")
    @classmethod
    def _level(cls, value: str) -> str:
        return settings.log_level(value)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ServerSettings:
        """Reads the environment.

        Raises:
            ZeusBSOConfigError: A setting is unknown or wrong; the message says which, and why.
        """
        given = settings.of_prefix(PREFIX, os.environ if environ is None else environ)
        for name in (*_OF_COMPOSE, *_OF_RUNS):
            given.pop(name, None)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ZeusBSOConfigError(settings.sentence(PREFIX, cls, error)) from None
