"""Module paths of ml-energy/zeus that are elsewhere here, or do not exist. `table` lists them. A
module that does not exist here is found by an import hook, and resolves each of its names in the
modules that have it; so `import a.b.c`, `from a.b import c` and pickles work. A module that exists
here, without some of the names, ends with `__getattr__ = old_names(__name__)`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zeus.compat.table import MODULES, NOT_SUPPORTED, PAGE, RENAMED

if TYPE_CHECKING:
    from importlib.abc import Loader as _Loader
else:
    _Loader = object  # importlib.abc imports half of what all of zeus.monitor does


def old_names(module: str) -> Callable[[str], Any]:
    """Makes a module's `__getattr__`."""

    def find(name: str) -> Any:
        what = NOT_SUPPORTED.get(f"{module}.{name}")
        if what is not None:
            raise _not_supported(f"{module}.{name}", what)
        homes = MODULES[module][1:]
        if name == "__all__" and isinstance(sys.modules[module].__loader__, _Finder):
            return _public(homes)  # for `from module import *`
        home, new = RENAMED.get(name, ("", name))
        if home in (module, *homes):
            return getattr(importlib.import_module(home), new)
        if not name.startswith("_"):
            for home in homes:
                value = getattr(importlib.import_module(home), name, None)
                if value is not None:
                    return value
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def _public(modules: Sequence[str]) -> list[str]:
    names = {old for old, (home, _) in RENAMED.items() if home in modules}
    for path in modules:
        names.update(name for name in vars(importlib.import_module(path)) if name[0] != "_")
    return sorted(names)


def _not_supported(path: str, what: str) -> ImportError:
    return ImportError(f"{path} is for {what}, which zeus does not support here; see {PAGE}")


class _Finder(_Loader):
    """Finds the modules of the table that do not exist here. It comes last."""

    def find_spec(
        self, path: str, search: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table; None for others.

        Raises:
            ImportError: It is for hardware that is not supported.
        """
        if path in NOT_SUPPORTED:
            raise _not_supported(path, NOT_SUPPORTED[path])
        if path not in MODULES:
            return None
        package = any(other.startswith(f"{path}.") for other in (*MODULES, *NOT_SUPPORTED))
        return ModuleSpec(path, self, is_package=package)

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Makes the module resolve its names in their new modules."""
        releases, *homes = MODULES[module.__name__]
        module.__doc__ = f"In ml-energy/zeus {releases}. Here: {', '.join(homes)}."
        vars(module)["__getattr__"] = old_names(module.__name__)
        if (
            module.__name__ == "zeus.optimizer.perseus.server.router"
        ):  # its variables had other names
            for name, value in list(os.environ.items()):
                if name.startswith("PERSEUS_"):
                    os.environ.setdefault(f"ZEUS_PFO_{name.removeprefix('PERSEUS_')}", value)


def install() -> None:
    """Makes Python find the modules of the table."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.append(_Finder())
