"""Types of the command lines' options and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.overriding import override
from zeus_ipc.parsing import Malformed, plain_number

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic for type checkers only, in older releases

F = TypeVar("F", bound=Callable[..., Any])


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


class _Plain(ParamType):
    """A number as people write it; click's own accept `nan` and `1_0`."""

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            plain_number(value if isinstance(value, str) else "0")
        except Malformed as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class Number(_Plain, click.FloatRange):
    """A number within a range."""


class Whole(_Plain, click.IntRange):
    """A whole number within a range."""


class _AnyNumber(_Plain, click.types.FloatParamType):
    pass


class _AnyWhole(_Plain, click.types.IntParamType):
    pass


NUMBER, WHOLE = _AnyNumber(), _AnyWhole()
PLAIN: dict[Any, Any] = {float: NUMBER, int: WHOLE}
"""What takes the place of Python's types, as the type of an option."""


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
SOCKET = _Path(path_type=str)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def option(
    names: str, text: str, kind: Any = None, default: Any = None, **more: Any
) -> Callable[[F], F]:
    """An option of a command.

    Args:
        names: Its names, and that of the parameter if it differs, with blanks between.
        text: Its help.
        kind: Its type; `bool`: it is a flag; a tuple: one of these.
        default: Its value otherwise, which the help shows.
    """
    if kind is bool:
        more["is_flag"] = True
    else:
        more["type"] = click.Choice(kind) if isinstance(kind, tuple) else PLAIN.get(kind, kind)
    if default is not None:
        more |= {"default": default, "show_default": default != ""}
    more["show_envvar"] = "envvar" in more
    return click.option(*names.split(), help=text, **more)
