"""Types of the command lines' options and arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.overriding import override


@contextmanager
def one_sentence() -> Iterator[None]:
    """Converts errors to a message of one sentence and an exit code."""
    try:
        yield
    except ZeusIpcError as error:
        raise click.ClickException(error.message) from None
    except (ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(
            f"{error.filename} cannot be used: {error.strerror}" if error.filename else str(error)
        ) from None


class Number(click.FloatRange):
    """A finite number within a range; click's own accepts NaN."""

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class _Path(click.Path):
    """A path that is not empty. `-` is None, standard output, where that is the default."""

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "-" and self.allow_dash:
            return None
        if value in ("", "-"):
            self.fail(f"{value!r} names no {self.name}; write ./- for one named -", param, ctx)
        return super().convert(value, param, ctx)


FILE = _Path(dir_okay=False, path_type=Path)
OUTPUT = _Path(dir_okay=False, writable=True, path_type=Path, allow_dash=True)
FOLDER = _Path(file_okay=False, path_type=Path)
