"""A progress bar for commands that take long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Shows a bar on standard error; None if that is not a terminal.

    Yields: A function of the amount done and the total.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=what, file=sys.stderr, show_pos=True) as bar:

        def tell(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield tell
