"""`measure_energy`: a decorator, and a block."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from zeus.exceptions import ZeusBaseError
from zeus.monitor import Window, ZeusMonitor

F = TypeVar("F", bound=Callable[..., Any])

_guard = threading.Lock()
_shared: ZeusMonitor | None = None


def shared_monitor() -> ZeusMonitor:
    """Returns the monitor of all GPUs of this process, created on first use."""
    global _shared
    with _guard:
        if _shared is None:
            _shared = ZeusMonitor()
        return _shared


def describe(name: str, window: Window) -> str:
    """A measurement on one line: time, energy, its uncertainty, mean power."""
    try:
        window.measurement.look_up()
        energy_j = window.total_energy
        uncertainty_j = window.uncertainty
    except ZeusBaseError as error:
        return f"{name}: {window.time:.3f} s, energy not known: {error.message}"
    power = f", {energy_j / window.time:.1f} W" if window.time else ""
    return f"{name}: {window.time:.3f} s, {energy_j:.4g} J ± {uncertainty_j:.2g} J{power}"


def _print(name: str, window: Window) -> None:
    print(describe(name, window), file=sys.stderr)


def _caller() -> object:
    """This thread, or its asyncio task."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()


class _Measured(AbstractContextManager[Window]):
    """One use of `measure_energy`: as a block, or as a decorator of functions."""

    def __init__(
        self,
        name: str | None,
        monitor: ZeusMonitor | None,
        report: Callable[[str, Window], object] | None,
        sync_execution: bool,
        wait: bool,
    ) -> None:
        self._name = name
        self._given = monitor
        self._report = report
        self._sync = sync_execution
        self._wait = wait
        self._open: list[tuple[object, Window]] = []

    @property
    def _monitor(self) -> ZeusMonitor:
        return shared_monitor() if self._given is None else self._given

    def __enter__(self) -> Window:
        window = self._monitor.window(self._name or "block", self._sync).__enter__()
        self._open.append((_caller(), window))
        return window

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _guard:  # Other threads and tasks may be in the same block.
            callers = [one[0] for one in self._open]
            caller = _caller()
            last = callers[::-1].index(caller) if caller in callers else 0
            _, window = self._open.pop(-1 - last)
        try:
            window.__exit__()
        finally:
            name, measurement = self._name or "block", window.measurement
            if self._report is _print and not self._wait:
                self._monitor.when_known(measurement, lambda _: _print(name, window))
                self._monitor.available(measurement)  # asks for it
            elif self._report is not None:
                self._report(name, window)

    def __call__(self, function: F) -> F:
        name, called = _called(function)

        def again() -> _Measured:
            return _Measured(self._name or name, self._given, self._report, self._sync, self._wait)

        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError(
                f"measure_energy measures calls, and {name} is a generator, whose "
                "work is done after the call; use `with measure_energy(...)` in it"
            )
        # An object's attributes, such as the weights of a compiled module, stay with it.
        updated = ("__dict__",) if inspect.isfunction(function) else ()
        like = functools.wraps(function, updated=updated)
        if inspect.iscoroutinefunction(called):

            @like
            async def wait(*args: Any, **kwargs: Any) -> Any:
                with again():
                    return await function(*args, **kwargs)

            return cast("F", wait)

        @like
        def call(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return cast("F", call)


def _called(function: Any) -> tuple[str, Any]:
    """Returns the name of what is called, and what runs then: an object's `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name), function if inspect.isroutine(function) else type(function).__call__


@overload
def measure_energy(name: F) -> F: ...


@overload
def measure_energy(
    name: str | None = None,
    *,
    monitor: ZeusMonitor | None = None,
    report: Callable[[str, Window], object] | None = _print,
    sync_execution: bool = True,
    wait: bool = False,
) -> _Measured: ...


def measure_energy(
    name: str | F | None = None,
    *,
    monitor: ZeusMonitor | None = None,
    report: Callable[[str, Window], object] | None = _print,
    sync_execution: bool = True,
    wait: bool = False,
) -> F | _Measured:
    """Measure each call of a function, or a block.

        @measure_energy
        def train(): ...

        with measure_energy("evaluation") as window:
            evaluate()
        print(window.total_energy)

    Args:
        name: Name of the window; None: the function's name.
        monitor: The GPUs; None: all that this process sees, determined on first use.
        report: Called with the name and the window after each; None: nothing. The default prints to
            standard error, from a thread, once the energy is known.
        wait: Print the default report before the call returns: after the sensors' next update.

    Raises:
        TypeError: The function is a generator, whose work is done after the call, or none.
    """
    if callable(name):
        return _Measured(None, monitor, report, sync_execution, wait)(name)
    if not isinstance(name, str | None):
        raise TypeError(
            f"measure_energy measures functions and blocks, and got a {type(name).__name__}; write "
            "@measure_energy next to the function, below @classmethod and others"
        )
    return _Measured(name, monitor, report, sync_execution, wait)
