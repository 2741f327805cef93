"""Settings of servers: environment variables with a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ValidationError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda text: text.split(",") if isinstance(text, str) else text),
]
"""Names separated by commas."""


def of_prefix(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that begin with a prefix, without it and in lower case."""
    return {
        variable.upper().removeprefix(prefix).lower(): value
        for variable, value in environ.items()
        if variable.upper().startswith(prefix)
    }


def log_level(value: str) -> str:
    """Validates a log level; returns it in upper case.

    Raises:
        ValueError: There is no such level.
    """
    if value.upper() not in LEVELS:
        raise ValueError(f"must be one of {', '.join(LEVELS)}, not {value!r}")
    return value.upper()


def sentence(prefix: str, model: type[BaseModel], error: ValidationError) -> str:
    """Describes the first invalid setting."""
    first = error.errors()[0]
    name = prefix + str(first["loc"][0]).upper() if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        known = ", ".join(prefix + field.upper() for field in model.model_fields)
        return f"{name} is not a setting; there are {known}"
    cause = first.get("ctx", {}).get("error")
    message = str(cause) if cause is not None else str(first["msg"])
    if not name:
        return f"{prefix}{message}"
    return f"{name}: {message.removeprefix(name.removeprefix(prefix) + ' ')}"
