"""Deletes one safety rule from a copy of the code, and runs the tests that must notice.

A rule is named by the symbol that keeps it (`zeusd.core.core.Core.tick`) and by the
names that its code uses (`expires_ns`), so that an entry survives every change of layout.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import needs
from tests.preloaded import Preloaded

Deletion = Callable[[ast.AST], tuple[ast.AST, str]]
"""Finds the node to replace inside a symbol, and the text that replaces it."""


class Mutation:
    """One rule, the symbol that keeps it, its deletion, and the tests that must notice.

    Args:
        rule: The rule in a few words.
        symbol: Dotted name of what keeps it: a module, with a class, with a method.
        deletion: `drop`, `never`, `always`, `becomes`, `unreached`, `instead` or `sets`.
        tests: Node ids below `tests/`. Each must fail without the rule.
    """

    def __init__(self, rule: str, symbol: str, deletion: Deletion, *tests: str) -> None:
        self.rule, self.symbol, self.deletion = rule, symbol, deletion
        self.tests = [f"tests/{test}" for test in tests]

    def __str__(self) -> str:
        return self.rule.replace(" ", "-")


def drop(*names: str) -> Deletion:
    """The one simple statement with these names does nothing: a call, an assignment, a raise."""
    return lambda body: (_the_one(_statements(body), names), "pass")


def never(*names: str) -> Deletion:
    """The one condition with these names is false."""
    return lambda body: (_the_one(_conditions(body), names), "False")


def always(*names: str) -> Deletion:
    """The one condition with these names is true."""
    return lambda body: (_the_one(_conditions(body), names), "True")


def becomes(code: str, *names: str) -> Deletion:
    """The one condition with these names is another."""
    return lambda body: (_the_one(_conditions(body), names), code)


def unreached(*names: str) -> Deletion:
    """The one branch that has a statement with these names is never entered."""

    def find(body: ast.AST) -> tuple[ast.AST, str]:
        branches = (node for node in ast.walk(body) if isinstance(node, (ast.If, ast.While)))
        branch = _the_one(branches, names, within=_simple_body)
        assert isinstance(branch, (ast.If, ast.While))
        return branch.test, "False"

    return find


def instead(name: str, code: str) -> Deletion:
    """The one call of this function becomes this code."""

    def find(body: ast.AST) -> tuple[ast.AST, str]:
        calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
        return _the_one(iter(calls), (name,), within=lambda call: call.func), code

    return find


def sets(name: str, code: str) -> Deletion:
    """The one assignment to this name assigns another value."""

    def find(body: ast.AST) -> tuple[ast.AST, str]:
        assigned = [node for node in ast.walk(body) if isinstance(node, ast.Assign)]
        one = _the_one(iter(assigned), (name,), within=lambda node: ast.Tuple(node.targets))
        assert isinstance(one, ast.Assign)
        return one.value, code

    return find


def without(mutation: Mutation, root: Path) -> tuple[Path, str]:
    """The file that keeps a rule, and its text once the rule is deleted.

    Args:
        mutation: The rule.
        root: Folder of the packages.

    Raises:
        LookupError: The symbol is gone, or its code uses the names nowhere or more than once.
    """
    path, names = _file_of(mutation.symbol, root)
    text = path.read_text(encoding="utf-8")
    try:
        node, code = mutation.deletion(_definition(ast.parse(text), names))
    except LookupError as error:
        raise LookupError(f"{mutation.symbol} keeps another rule now: {error}") from None
    return path, _replaced(text, node, code)


def _file_of(symbol: str, root: Path) -> tuple[Path, list[str]]:
    parts = symbol.split(".")
    for count in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:count]).with_suffix(".py")
        if path.is_file():
            return path, parts[count:]
    raise LookupError(f"no module has {symbol}")


def _definition(tree: ast.AST, names: list[str]) -> ast.AST:
    for name in names:
        inside = (
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name == name
        )
        found = next(inside, None)
        if found is None:
            raise LookupError(f"it has no {name}")
        tree = found
    return tree


def _simple_body(branch: ast.If | ast.While) -> ast.AST:
    """The statements of a branch, without those of nested branches."""
    body: list[ast.stmt] = [one for one in branch.body if isinstance(one, _SIMPLE)]
    return ast.Module(body, [])


_SIMPLE = (
    ast.Expr,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Delete,
    ast.Raise,
    ast.Return,
)


def _statements(body: ast.AST) -> Iterator[ast.AST]:
    return (node for node in ast.walk(body) if isinstance(node, _SIMPLE))


def _conditions(body: ast.AST) -> Iterator[ast.AST]:
    """Decisions: the tests of `if`, `while` and `a if b else c`, operand by operand."""
    for node in ast.walk(body):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield from _operands(node.test)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.BoolOp):
            yield from _operands(node.value)


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value)
    else:
        yield test


def _names(node: ast.AST) -> set[str]:
    return {
        found.id if isinstance(found, ast.Name) else found.attr
        for found in ast.walk(node)
        if isinstance(found, (ast.Name, ast.Attribute))
    }


def _the_one(
    nodes: Iterator[Any],
    names: tuple[str, ...],
    within: Callable[[Any], ast.AST] = lambda node: node,
) -> ast.AST:
    found: list[ast.AST] = [node for node in nodes if _names(within(node)).issuperset(names)]
    if len(found) > 1:  # the one that uses no others
        found = [node for node in found if _names(within(node)) == {*names}] or found
    if len(found) != 1:
        raise LookupError(f"its code uses {' and '.join(names)} in {len(found)} places, not in one")
    return found[0]


def _replaced(text: str, node: ast.AST, code: str) -> str:
    lines = text.encode().splitlines(keepends=True)  # columns count bytes
    assert isinstance(node, (ast.expr, ast.stmt))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + code.encode() + after).decode()


# ------------------------------------------------------------------------------- the tests' runner

PRELOADED = (
    # What pytest's plugins import, and the plugins themselves must not be: pytest rewrites them.
    *("pytest", "hypothesis", "pdb", "xml.etree.ElementTree"),
    *("pydantic.type_adapter", "zmq", "msgpack", "click", "pynvml", "grpc", "kubernetes.config"),
    *("fastapi.testclient", "sqlalchemy.orm", "prometheus_client", "httpx"),
    # The models of the protocol take longest. A rule in one of these would stay in force, and its
    # entry fail.
    *("zeus_ipc.operations", "zeus_ipc.client"),
)

PACKAGES = ("zeus_ipc", "zeus_ipc.replies")
"""Those preloaded: their other modules come from the copy."""

PYTEST = f"""
import os, sys
for name in {PACKAGES}:
    sys.modules[name].__path__ = [os.path.abspath(name.replace(".", "/"))]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""

PLUGINS = ("-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")
"""What the tests use; to look through all packages for others takes longer than most tests."""

PLAIN = "--tb=native"
"""Failures as Python has them: to show the sources as pytest does takes as long as a test."""

_SECONDS = itertools.count(1)


def linked(source: str, target: str) -> None:
    """Copies a file of a tree that tests do not write to: `rewrite` makes another file."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def rewrite(path: Path, text: str) -> None:
    """Replaces a module, dated as no other text of it: a compiled module is told apart by size and
    second of its source, and a deleted rule could live on in it.
    """
    other = path.with_suffix(".part")
    other.write_text(text, encoding="utf-8")
    second = next(_SECONDS)
    os.utime(other, (second, second))
    other.replace(path)


def run_tests(
    preloaded: Preloaded, root: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs pytest with these arguments on the copy in a folder."""
    environment = needs.ignored()
    environment.pop("PYTEST_XDIST_WORKER", None)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nothing is compiled twice
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return preloaded.run("-c", PYTEST, *PLUGINS, PLAIN, *arguments, cwd=root, env=environment)


def why_not_run(ran: subprocess.CompletedProcess[str]) -> str | None:
    """Why tests were not run of which none failed; None if all were run, or any failed.

    Those that were not run may be those that notice.
    """
    if ran.returncode:
        return None
    reason = re.search(r"^ +\d+  (.+)$", ran.stdout.partition(needs.TITLE)[2], re.MULTILINE)
    return reason[1] if reason else None
