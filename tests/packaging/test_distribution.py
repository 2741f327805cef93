"""The wheel and the source distribution: built, complete, and all that each extra promises."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.packaging.closure import PROJECT, ROOT, distributions_of, folder_of, size_bytes
from tests.packaging.promises import BASE, FOR_DEVELOPERS, PROMISES
from tests.support import PACKAGES
from zeus_ipc import __version__

NOT_HERE = {"systemd"}
"""Extras that need a compiler: tests/system/test_systemd.py installs them."""

MIB = 1 << 20


class Built(NamedTuple):
    """The built files, and the folder of the unpacked wheel."""

    wheel: Path
    sdist: Path
    unpacked: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source distribution of the tree, and the wheel of the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return Built(wheel, sdist, unpacked)


def test_the_registry_would_take_both(built: Built) -> None:
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(built.wheel), str(built.sdist)],
        check=True,
    )


def test_the_version_has_one_source(built: Built) -> None:
    assert built.wheel.name == f"zeusd-{__version__}-py3-none-any.whl"
    assert built.sdist.name == f"zeusd-{__version__}.tar.gz"
    metadata = (built.unpacked / f"zeusd-{__version__}.dist-info" / "METADATA").read_text()
    assert HeaderParser().parsestr(metadata)["Version"] == __version__
    assert "version" in PROJECT["dynamic"]
    said = re.compile(rf"(?<![\w.]){re.escape(__version__)}(?![\w.])")
    elsewhere = [
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if path.name != "_version.py" and said.search(path.read_text(encoding="utf-8"))
    ]
    assert not elsewhere


def test_the_wheel_has_the_packages_and_all_their_files(built: Built) -> None:
    names = {*PACKAGES}
    tracked = {
        path.relative_to(ROOT).as_posix()
        for name in names
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {
        path.relative_to(built.unpacked).as_posix()
        for path in built.unpacked.rglob("*")
        if path.is_file()
        and ".dist-info" not in path.as_posix()
        and "__pycache__" not in path.parts  # of the tests below
    }
    assert packed == tracked
    assert {"zeus/py.typed", "zeus_ipc/py.typed"} <= packed  # the libraries
    notices = f"zeusd-{__version__}.dist-info/licenses"
    assert (built.unpacked / notices / "NOTICE").is_file()
    assert (built.unpacked / notices / "LICENSE").is_file()


def test_the_source_distribution_is_the_project(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("README.md", "scripts/test", "systemd/zeusd.service", "tests/support.py"):
        assert name in names, name
    assert not {name for name in names if "__pycache__" in name or name.startswith(".venv")}


def run_with_only(extra: str, unpacked: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The wheel keeps an extra's promise with only that extra's distributions to import."""
    brought = folder / "brought"
    brought.mkdir()
    folder_of(distributions_of(None if extra == BASE else extra), brought)
    # Nothing that is imported is garbage, and to look for it takes an eighth of an import.
    begin = f"import gc, sys\ngc.disable()\nsys.path += [{str(unpacked)!r}, {str(brought)!r}]"
    program = f"{begin}\n{PROMISES[extra]}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_each_extra_is_spoken_for() -> None:
    assert set(PROMISES) == {BASE, *PROJECT["optional-dependencies"]} - FOR_DEVELOPERS


@pytest.mark.parametrize("extra", sorted(set(PROMISES) - NOT_HERE))
def test_an_extra_brings_what_it_promises(extra: str, built: Built, tmp_path: Path) -> None:
    done = run_with_only(extra, built.unpacked, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", sorted(set(PROMISES) - NOT_HERE - {BASE, "torch"}))
def test_without_the_extra_there_is_nothing_of_it(
    extra: str, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promise fails without its extra, so the test above can fail."""
    monkeypatch.setitem(PROMISES, BASE, PROMISES[extra])
    done = run_with_only(BASE, built.unpacked, tmp_path)
    assert done.returncode != 0


def test_the_base_is_small(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        own = sum(item.file_size for item in archive.infolist())
    size = own + size_bytes(distributions_of(None))
    assert size < 15.5 * MIB, f"{size / MIB:.1f} MiB"
    page = (ROOT / "docs/operate/install.md").read_text()
    assert re.findall(r"# (\d+) MB with dependencies", page) == [f"{size / 1e6:.0f}"]
    assert built.wheel.stat().st_size < 1.3 * MIB
