"""Settings of the HTTP servers: environment variables with a prefix."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from zeus.exceptions import ZeusBaseError

if TYPE_CHECKING:
    from typing_extensions import Self

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda text: text.split(",") if isinstance(text, str) else text),
]
"""Names separated by commas."""


def _level(value: str) -> str:
    if value.upper() not in LEVELS:
        raise ValueError(f"must be one of {', '.join(LEVELS)}, not {value!r}")
    return value.upper()


class HttpSettings(BaseModel):
    """Settings of all servers, each from the variable of its name, in capitals after the server's
    prefix.

    Attributes:
        token: Requests that change something must send it as `Authorization: Bearer`.
        log_level: DEBUG (every request), INFO, WARNING, ERROR or CRITICAL.
        hosts: Other names by which browsers reach the server, such as a proxy's, with port if it is
            not the usual one: `NAME,NAME:PORT`.
        root_path: Prefix of its paths behind a proxy, such as `/plans`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    prefix: ClassVar[str]
    error: ClassVar[type[ZeusBaseError]]
    others: ClassVar[tuple[str, ...]] = ()
    """Variables with this prefix that are not settings of the server."""

    token: str = Field(default="", repr=False)
    log_level: Annotated[str, AfterValidator(_level)] = "INFO"
    hosts: Names = ()
    root_path: str = Field(default="", pattern="^(/[^/]+)*$")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Reads the environment.

        Raises:
            ZeusBaseError: A setting is unknown or wrong; the message says which, and why.
        """
        environ = os.environ if environ is None else environ
        given = {
            name.upper().removeprefix(cls.prefix).lower(): value
            for name, value in environ.items()
            if name.upper().startswith(cls.prefix)
        }
        try:
            return cls.model_validate({n: v for n, v in given.items() if n not in cls.others})
        except ValidationError as error:
            raise cls.error(cls._sentence(error)) from None

    @classmethod
    def _sentence(cls, error: ValidationError) -> str:
        """Describes the first invalid setting."""
        first = error.errors()[0]
        name = cls.prefix + str(first["loc"][0]).upper() if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            own = [field for field in cls.model_fields if field not in HttpSettings.model_fields]
            known = [cls.prefix + field.upper() for field in (*own, *HttpSettings.model_fields)]
            return f"{name} is not a setting; there are {', '.join(known)}"
        cause = first.get("ctx", {}).get("error")
        message = str(cause) if cause is not None else str(first["msg"])
        if not name:
            return f"{cls.prefix}{message}"
        return f"{name}: {message.removeprefix(name.removeprefix(cls.prefix) + ' ')}"
