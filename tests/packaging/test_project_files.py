"""Workflows, templates, hooks and the release's check: they parse, and name what there is."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.closure import PROJECT, ROOT
from tests.support import PACKAGES, public_directory

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PROGRAMS = re.compile(r"(?<![\w./-])((?:scripts|packaging|docker|\.ci)/[\w.-]+)")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_bounded_and_runs_what_there_is(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}, "more only where a job needs it"
    assert workflow[True], "when it runs: YAML reads `on` as true"
    extras = set(PROJECT["optional-dependencies"])
    for name, job in workflow["jobs"].items():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
            continue
        assert job["timeout-minutes"] <= 60, name
        for step in job["steps"]:
            uses, run = step.get("uses", ""), step.get("run", "")
            assert bool(uses) != bool(run)
            assert not uses or re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", uses), uses
            for program in PROGRAMS.findall(run):
                assert (ROOT / program).is_file(), program
            for asked in re.findall(r"'\.\[(.*?)\]'", run):
                assert set(asked.split(",")) <= extras
            for module in re.findall(r"python -m (tests\.[\w.]+)", run):
                assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_the_site_that_is_published_is_the_one_that_is_built() -> None:
    steps = read(ROOT / ".github/workflows/build.yml")["jobs"]["site"]["steps"]
    published = next(
        step["with"]["path"] for step in steps if "with" in step and "path" in step["with"]
    )
    folder = re.search(r"^site_dir: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert folder
    assert published.rstrip("/") == folder[1]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_asks_for_what_can_be_answered(path: Path) -> None:
    form = read(path)
    if path.stem == "config":
        assert all(link["url"].startswith("https://") for link in form["contact_links"])
        return
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_hooks_run_what_the_suite_runs() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    entries = {hook["id"]: hook["entry"] for hook in repository["hooks"]}
    script = (ROOT / "scripts/test").read_text()
    for name in ("ruff format", "ruff check", "mypy"):
        assert any(entry.startswith(name) for entry in entries.values()), name
        assert f"/{name}".replace(" ", '" ', 1) in script or f'/{name}"' in script, name


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The checks of a release."""
    for name in ("scripts/check-release", "zeus_ipc/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / "zeus_ipc/_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.3 - 2026-01-02\n\n- new\n\n## 1.2.2 - 2026-01-01\n\n- old\n"
    )
    return tmp_path


def check_release(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(tree / "scripts/check-release"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_release_has_its_version_and_its_notes(tree: Path) -> None:
    done = check_release(tree, "v1.2.3", "--notes")
    assert (done.returncode, done.stdout.strip()) == (0, "- new")


@pytest.mark.parametrize(
    ("tag", "changelog", "told"),
    [
        ("v1.2.4", "## 1.2.3 - 2026-01-02", "zeus_ipc/_version.py says 1.2.3"),
        ("v1.2.3", "## 1.2.2 - 2026-01-02", "has no entry"),
        ("v1.2.3", "## 1.2.3 - unreleased", "has no date yet"),
    ],
)
def test_a_tag_that_is_no_release_is_refused(
    tree: Path, tag: str, changelog: str, told: str
) -> None:
    (tree / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}\n")
    done = check_release(tree, tag)
    assert done.returncode == 1
    assert told in done.stderr


def sourced(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with the functions of scripts/lib/python.sh."""
    source = f"source scripts/lib/python.sh; {command}"
    environment = {**os.environ, "PYTHON": "", **variables}
    return subprocess.run(
        ["bash", "-euc", source], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_an_interpreter_that_is_named_is_used_or_refused(tmp_path: Path) -> None:
    named = tmp_path / "mit Leerzeichen, größer" / "python3"
    named.parent.mkdir()
    named.symlink_to(Path(sys.executable).resolve())
    assert sourced("find_python", PYTHON=str(named)).stdout == f"{named}\n"
    refused = sourced("find_python", PYTHON="/nowhere/python3")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("PYTHON=/nowhere/python3 is no Python 3.10 or newer")


def test_a_folder_is_open_to_all_if_those_above_it_are() -> None:
    with public_directory() as directory:
        folder = directory / "with a space" / "is not there yet"
        folder.parent.mkdir(mode=0o755)
        assert sourced(f"open_to_all '{folder}'").returncode == 0
        directory.chmod(0o700)
        assert sourced(f"open_to_all '{folder}'").returncode == 1


def test_an_environment_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = sourced(f"make_venv '{sys.executable}' '{tmp_path}/file/venv' ZEUSD_VENV")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        f"{tmp_path}/file/venv cannot be made; name another folder with ZEUSD_VENV="
    )


def test_an_environment_is_for_all_users_whatever_the_umask(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1 $2" = "-m venv" ] && mkdir "$3/bin"\n')
    python.chmod(0o755)
    ran = sourced(f"umask 077; make_venv '{python}' '{tmp_path}/venv' ZEUSD_VENV")
    assert ran.returncode == 0, ran.stderr
    for folder in (tmp_path / "venv", tmp_path / "venv/bin"):
        assert folder.stat().st_mode & 0o777 == 0o755


def test_the_manual_page_of_the_restore_helper_has_its_options(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "packaging/manual.py"), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    page = (tmp_path / "zeusd-restore.1").read_text(encoding="utf-8").replace("\\-", "-")
    for option in ("--state-dir", "--library", "--all", "--on-failure", "--dry-run"):
        assert f"\\fB{option}" in page


@pytest.mark.needs("debhelper")
@pytest.mark.parametrize("plugin", ["spank", "energy"])
def test_a_plugin_of_slurm_is_installed_only_where_slurm_looks(plugin: str, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" != -print-multiarch ] || echo x86_64-linux-gnu\n')
    compiler.chmod(0o755)
    said = [
        subprocess.run(
            ["make", "-n", "-C", str(ROOT / "examples/slurm" / plugin), "install", f"CC={compiler}"]
            + more,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        for more in ([], ["LIBDIR="])
    ]
    assert "/usr/lib/x86_64-linux-gnu/slurm-wlm/" in said[0].stdout
    assert said[1].returncode != 0
    assert "LIBDIR=" in said[1].stderr


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
}


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """The modules of this project that a tree imports."""
    package = MODULES[module].name == "__init__.py"
    parts = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) + package - node.level] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            for name in node.names:
                inner = f"{home}.{name.name}"
                yield from [one for one in (inner, home) if one in MODULES][:1]


def at_import(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported: no bodies of functions, nothing for type checkers."""

    class Runs(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None: ...

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None: ...

        def visit_If(self, node: ast.If) -> Any:
            return node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node

    found: ast.Module = Runs().visit(tree)
    return found


def test_arrows_point_down_and_no_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        rank = PACKAGES.index(module.split(".")[0])
        for name in imports(module, tree):
            assert PACKAGES.index(name.split(".")[0]) <= rank, f"{module} imports {name}"
        graph[module] = {*imports(module, at_import(tree))} - {module}
    assert len(graph) > 400
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
