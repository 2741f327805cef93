"""Objects that are copied and sent to other processes as their configuration."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


class Configured:
    """Base of what belongs to the process that created it: monitors, callbacks and optimizers, with
    their connections, threads and windows. `pickle` and `copy` keep the arguments of the
    constructor. It is called with them where a copy is first used; so copies that are never used,
    as those of averaged models, cost nothing.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _recorded(vars(cls)["__init__"])  # type: ignore[method-assign]  # wrapped

    def __reduce__(self) -> tuple[Any, ...]:
        import pickle  # with what asks for this, so that zeus itself is imported sooner

        kind, args, kwargs = _configuration(self)
        for name, value in (*enumerate(args, 1), *kwargs.items()):
            if isinstance(value, (Configured, FunctionType)):
                continue  # an error of it says enough, and other picklers take functions
            try:
                pickle.dumps(value)
            except Exception as error:  # noqa: BLE001 - of any class's
                raise TypeError(
                    f"{kind.__name__} cannot be sent to another process with its argument {name}, "
                    f"{type(value).__name__}; create it there: {error}"
                ) from None
        return _closed, (kind, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind, args, kwargs = _configuration(self)

        def copied(value: Any) -> Any:
            return copy.deepcopy(value, memo) if isinstance(value, Configured) else value

        values = {name: copied(value) for name, value in kwargs.items()}
        return _closed(kind, tuple(map(copied, args)), values)

    def __copy__(self) -> Any:
        return _closed(*_configuration(self))


class OfProcess:
    """Base of what can be neither copied nor sent to another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{type(self).__name__} belongs to the process that created it: leave it out of what "
            "is copied or sent, and create another where it is needed"
        )


def _recorded(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def record(self: Configured, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault("_configuration", (args, kwargs))  # not a base's
        init(self, *args, **kwargs)

    return record


def _configuration(self: Configured) -> tuple[type[Configured], tuple[Any, ...], dict[str, Any]]:
    kind = type(self)
    if issubclass(kind, _Closed):
        kind = kind.__mro__[2]
    return kind, *vars(self)["_configuration"]


class _Closed:
    """A copy whose constructor has not been called yet: it is when any attribute is used."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(_open(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_open(self), name, value)


def _open(self: Any) -> Any:
    closed = type(self)
    kind, args, kwargs = _configuration(self)
    object.__setattr__(self, "__class__", kind)
    try:
        kind.__init__(self, *args, **kwargs)
    except BaseException:
        object.__setattr__(self, "__class__", closed)
        raise
    return self


def _closed(kind: type[Configured], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    self: Any = object.__new__(_closed_class(kind))
    vars(self)["_configuration"] = args, kwargs
    return self


_closed_classes: dict[Any, Any] = {}


def _closed_class(kind: Any) -> Any:
    if kind not in _closed_classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _closed_classes[kind] = type(kind.__name__, (_Closed, kind), names)
    return _closed_classes[kind]
