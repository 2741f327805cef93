"""How the server is set up: environment variables that begin with `ZEUS_BSO_`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError
from zeus.optimizer.batch_size.store import LEASE_S

PREFIX = "ZEUS_BSO_"
DATABASE = "bso.db"

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_OF_COMPOSE = ("db_user", "db_password", "root_password", "server_port")
"""What ml-energy/zeus's compose files set beside the server's settings."""

_OF_RUNS = ("run_id",)
"""What names a training run, see `client`."""


class ServerSettings(BaseModel):
    """The settings; each is read from the variable of its name, in capitals after `ZEUS_BSO_`.

    Attributes:
        database_url: `postgresql://...`, `sqlite:///...`, or the path of a SQLite file.
        token: What requests that change something must bring as `Authorization: Bearer`.
        read_token: What requests that only read must bring; they may bring the other, too. Without
            it anybody may read.
        lease_s: A trial is lost when nothing was heard of it for so long, s.
        reference_lease_s: The same for trials of ml-energy/zeus's clients, who are heard of only at
            the end of an epoch, s.
        log_level: DEBUG (every request), INFO, WARNING, ERROR or CRITICAL.
        echo_sql: Whether SQL statements are logged.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    database_url: str = Field(default=DATABASE, min_length=1, repr=False)
    token: str = Field(default="", repr=False)
    read_token: str = Field(default="", repr=False)
    lease_s: float = Field(default=LEASE_S, gt=0, allow_inf_nan=False)
    reference_lease_s: float = Field(default=86400.0, gt=0, allow_inf_nan=False)
    log_level: str = "INFO"
    echo_sql: bool = False

    @field_validator("log_level")
    @classmethod
    def _level(cls, value: str) -> str:
        if value.upper() not in _LEVELS:
            raise ValueError(f"must be one of {', '.join(_LEVELS)}, not {value!r}")
        return value.upper()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ServerSettings:
        """Reads the environment.

        Raises:
            ZeusBSOConfigError: A setting is unknown or wrong; it says which, and why.
        """
        environ = os.environ if environ is None else environ
        given: dict[str, str] = {}
        for variable, value in environ.items():
            name = variable.upper()
            if name.startswith(PREFIX):
                given[name.removeprefix(PREFIX).lower()] = value
        for name in (*_OF_COMPOSE, *_OF_RUNS):
            given.pop(name, None)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ZeusBSOConfigError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = PREFIX + str(first["loc"][0]).upper()
    if first["type"] == "extra_forbidden":
        known = ", ".join(PREFIX + field.upper() for field in ServerSettings.model_fields)
        return f"{name} is no setting; there are {known}"
    return f"{name}: {str(first['msg']).removeprefix('Value error, ')}"
