"""The distributions of an extra, by the metadata of what is installed here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@functools.cache
def distributions_of(extra: str | None) -> frozenset[str]:
    """Names of all distributions that `pip install zeusd[extra]` would bring, with theirs.

    Raises:
        PackageNotFoundError: One of them is not installed here.
    """
    found: set[str] = set()
    asked: set[tuple[str, str]] = set()

    def bring(lines: Iterable[str], with_extra: str) -> None:
        for line in lines:
            needed = Requirement(line)
            if needed.marker and not needed.marker.evaluate({"extra": with_extra}):
                continue
            name = canonicalize_name(needed.name)
            for one in ("", *needed.extras):
                if (name, one) in asked:
                    continue
                asked.add((name, one))
                if name == "zeusd":
                    bring(PROJECT["optional-dependencies"][one] if one else (), one)
                    continue
                requires = distribution(name).requires or ()
                found.add(name)
                bring(requires, one)

    bring(PROJECT["dependencies"], "")
    bring(PROJECT["optional-dependencies"][extra] if extra else (), "")
    return frozenset(found)


def folder_of(distributions: Iterable[str], folder: Path) -> None:
    """Makes a folder from which only the files of these distributions can be imported."""
    for name in distributions:
        for top, path in _brought_by(name).items():
            link = folder / top
            if not link.is_symlink():
                link.symlink_to(path)


@functools.cache
def _brought_by(name: str) -> dict[str, Path]:
    """The top-level files of a distribution: modules, packages, its metadata."""
    found = distribution(name)
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    return {top: Path(str(found.locate_file(top))).resolve() for top in sorted(tops)}


def size_bytes(distributions: Iterable[str]) -> int:
    """What their files take, without compiled modules."""
    total = 0
    for name in distributions:
        for file in distribution(name).files or ():
            path = Path(str(file.locate()))
            if path.suffix != ".pyc" and path.is_file():
                total += path.stat().st_size
    return total
