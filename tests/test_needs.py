"""A test whose needs are missing does not run and is reported, or fails; no test is skipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.support import PACKAGES, as_nobody, public_directory

COREUTILS = (
    *("basename", "cat", "chmod", "cksum", "cp", "cut", "date", "dirname", "env", "head", "id"),
    *("ln", "ls", "mkdir", "mktemp", "mv", "rm", "sleep", "sort", "stat", "tail", "touch", "true"),
)
OTHERS = ("bash", "sh", "git", "grep", "sed")

WITHOUT = {
    "tests/zeusctl/test_terminal.py::test_shells_complete_verbs_and_gpus[zsh]": "zsh",
    "tests/zeusctl/test_terminal.py::test_shells_complete_verbs_and_gpus[fish]": "fish",
    "tests/zeusctl/test_terminal.py::test_manual_pages_are_clean_and_name_every_option": "groff",
    "tests/zeusctl/test_exporter.py::test_rules_are_valid_and_fire_when_they_should": "prometheus",
    "tests/zeus/metric/test_pushes.py::test_each_window_is_one_observation": "pushgateway",
    "tests/zeusctl/test_reading.py::"
    "test_an_ordinary_user_reads_and_learns_what_is_denied": "two users",
    "tests/test_mutations.py::"
    "test_the_rule_is_missed_when_its_code_is_gone[journal-before-the-device]": "gcc",
}
"""Tests, and what keeps an ordinary user without tools from running each."""
WITH = "tests/zeusctl/test_terminal.py::test_shells_complete_verbs_and_gpus[bash]"


@pytest.fixture(scope="module")
def bare() -> Iterator[tuple[Path, dict[str, Any]]]:
    """A copy of the sources that an ordinary user may read, and how that user starts programs."""
    with public_directory() as folder:
        for name in (*PACKAGES, "tests", "scripts", "benchmarks"):
            shutil.copytree(needs.ROOT / name, folder / name)  # with what is compiled
        for name in ("pyproject.toml", "README.md"):
            shutil.copy2(needs.ROOT / name, folder)
        for name in ("examples", "docs"):
            shutil.copytree(needs.ROOT / name, folder / name)
        # The checkout may have been made under umask 077.
        subprocess.run(["chmod", "-R", "go+rX", folder], check=True)
        programs = folder / "bin"
        programs.mkdir()
        for name in (*COREUTILS, *OTHERS):
            path = shutil.which(name)
            assert path is not None, f"this machine lacks {name}"
            (programs / name).symlink_to(path)
        (programs / "python3").symlink_to(sys.executable)
        home = folder / "home"
        home.mkdir()
        home.chmod(0o777)
        environment = {"PATH": str(programs), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"HOME": str(home), "TMPDIR": str(home)}
        yield folder, {"cwd": folder, "env": environment, **as_nobody()}


def test_an_ordinary_user_without_tools_learns_which_tests_did_not_run(
    bare: tuple[Path, dict[str, Any]],
) -> None:
    _, how = bare
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run([*command, *WITHOUT, WITH], stdout=subprocess.PIPE, text=True, **how)
    assert ran.returncode == 0, ran.stdout
    *_, last = ran.stdout.splitlines()
    assert last.startswith(f"1 passed, {len(WITHOUT)} skipped"), ran.stdout
    told = ran.stdout.partition("= not run =")[2]
    assert f"{len(WITHOUT)} tests were not run:" in told
    for need in {*WITHOUT.values()}:
        count = [*WITHOUT.values()].count(need)
        assert re.search(rf"^ +{count}  needs {need}$", told, re.MULTILINE), told
    tools = ", ".join(sorted({*WITHOUT.values()} & needs.TOOLS.keys()))
    assert f"Install {tools}: {needs.TOOLS_COMMAND}" in told

    how = {**how, "env": {**how["env"], "ZEUSD_TEST_ALL": "yes"}}
    zsh = next(iter(WITHOUT))
    ran = subprocess.run([*command, zsh, WITH], stdout=subprocess.PIPE, text=True, **how)
    assert ran.returncode == 1, ran.stdout
    *_, last = ran.stdout.splitlines()
    assert last.startswith("1 passed, 1 error in"), ran.stdout
    assert f"needs zsh. Install zsh: {needs.TOOLS_COMMAND}" in ran.stdout


def test_everything_must_run_where_continuous_integration_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZEUSD_TEST_ALL", raising=False)
    for text, must in (("true", True), ("false", False)):
        monkeypatch.setenv("CI", text)
        assert needs.must_run_all() is must
    monkeypatch.setenv("ZEUSD_TEST_ALL", "yes")
    assert needs.must_run_all()


def test_the_command_that_installs_says_what_is_missing_where_it_cannot(
    bare: tuple[Path, dict[str, Any]],
) -> None:
    folder, how = bare

    def tools(*names: str) -> str:
        ran = subprocess.run(
            ["scripts/test", "--tools", *names], stderr=subprocess.PIPE, text=True, **how
        )
        assert ran.returncode == 1, ran.stderr
        return ran.stderr

    told = tools()
    assert "This system has no apt-get." in told
    named = set(re.findall(r"^ +(\S+): ", told, re.MULTILINE))
    missing = {"zsh", "fish", "tmux", "groff", "prometheus", "pushgateway", "lintian", "util-linux"}
    assert missing <= named <= needs.TOOLS.keys()
    assert "git" not in named
    assert "zsh: zsh\n" in tools("zsh")
    assert "fish" not in tools("zsh")
    (folder / "bin/apt-get").symlink_to("/bin/true")
    if os.getuid() != 0 or as_nobody():
        assert "Only root can install packages: sudo scripts/test --tools" in tools("zsh")


def test_a_need_is_a_tool_or_a_right() -> None:
    with pytest.raises(KeyError):
        needs.unmet("no such thing")
    assert all(part in needs.NAMES for parts in needs.GROUPS.values() for part in parts)


def test_reasons_are_counted_and_followed_by_the_commands_that_help() -> None:
    assert needs.summary([]) == []
    assert needs.summary(["needs root, zsh", "needs zsh", "needs zsh", "too cold"]) == [
        "4 tests were not run:",
        "    1  needs root, zsh",
        "    2  needs zsh",
        "    1  too cold",
        f"Install zsh: {needs.TOOLS_COMMAND}",
        f"Run as root what needs root, two users or CAP_SYS_ADMIN: {needs.ROOT_COMMAND}",
    ]


def test_root_is_warned_of_an_interpreter_that_others_may_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert needs.summary(["needs two users"])[2:] == [
        f"Other users may not run {sys.executable}; make the environment with a Python that they "
        f"may run: {needs.PYTHON_COMMAND}"
    ]


def test_nothing_is_skipped_in_another_way() -> None:
    others = re.compile(r"mark\.skip|pytest\.skip\(|importorskip|unittest\.skip")
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.name not in ("needs.py", Path(__file__).name):
            assert not others.search(path.read_text()), f"{path}: use tests/needs.py"
