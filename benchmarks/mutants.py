"""Mutates random lines of the product, one at a time, and counts what its tests notice.

    python benchmarks/mutants.py zeusd/core [--count 20] [--seed N] [--tests tests/system ...]

The tests of the room, and those of `--tests`, run once under coverage.py (`pip install coverage`).
Each mutant then has a copy of the repository, in which the tests run that executed its line, also
in child processes, the quickest first; then, as coverage misses those that are killed, those of
files that name its module. Mutants that change nothing are in `benchmarks/mutants.txt`, with the
reason, and are not counted.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_suffix(".txt")
PACKAGES = ("zeusd", "zeus_ipc", "zeus_common", "zeus", "zeusctl", "zeus_fleet")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0")

NODEID = "tests/[^ \n|]+::[^\n|]+"

TIMES = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        print(f"\\n@{report.nodeid}|{report.duration}")
"""
CONTEXTS = """
import coverage, pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    coverage.Coverage.current().switch_context(item.nodeid)
    return (yield)
"""


CONFIGURATION = """
[run]
include = {include}
data_file = {root}/.coverage
parallel = true
patch = subprocess
context = ${{PYTEST_CURRENT_TEST-}}
"""


@dataclass(frozen=True)
class Mutant:
    """One place of a file, and what stands there instead."""

    path: str
    line: int
    source: str
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: `{self.before}` -> `{self.after}`"

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it in the list of equivalents, whatever its line's number."""
        return self.path, self.source, self.after


COMPARED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
}


def changes(node: ast.AST) -> Iterator[str]:
    """Texts that could stand in the place of a node."""
    say = ast.unparse
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARED[type(node.ops[0])]:
            yield f"({say(node.left)} {other} {say(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        yield "(" + other.join(f"({say(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({say(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield f"(({say(node.left)}) {COMPUTED[type(node.op)]} ({say(node.right)}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield from (repr(node.value + 1), repr(node.value * 1000 or -1))
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield f"(not ({say(node.test)}))"
    elif isinstance(node, ast.Return) and node.value and say(node.value) not in ("None", "False"):
        yield "return None"
    elif isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        if say(node.func) not in ("max", "min"):
            yield f"{say(node.func)}({say(node.args[1])}, {say(node.args[0])})"
    elif isinstance(
        node, (ast.Expr, ast.Raise, ast.AugAssign, ast.Continue, ast.Break, ast.Assign)
    ):
        yield "pass"


def mutable(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of functions and modules that run: no annotations, no docstrings."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.keyword) and child.arg in ("strict", "slots", "frozen"):
            continue  # of `zip` and `dataclass`
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in child.body:
                yield from mutable(ast.Module([statement], []))
        elif isinstance(child, ast.AnnAssign):
            if child.value:
                yield child.value
                yield from mutable(child.value)
        elif not isinstance(child, ast.JoinedStr):
            yield from mutable(child)


def mutants(path: Path) -> dict[int, list[Mutant]]:
    """All mutants of a file, by line."""
    text = path.read_bytes()  # columns count bytes
    lines = text.splitlines(keepends=True)
    name = str(path.relative_to(REPOSITORY))
    by_line: dict[int, list[Mutant]] = collections.defaultdict(list)
    for node in mutable(ast.parse(text)):
        place: Any = node.test if isinstance(node, (ast.If, ast.While, ast.IfExp)) else node
        for after in changes(node):
            start = len(b"".join(lines[: place.lineno - 1])) + place.col_offset
            end = len(b"".join(lines[: place.end_lineno - 1])) + place.end_col_offset
            mutated = (text[:start] + after.encode() + text[end:]).decode()
            source = lines[place.lineno - 1].decode().strip()
            before = " ".join(text[start:end].decode().split())
            mutant = Mutant(name, place.lineno, source, before, after, mutated)
            by_line[place.lineno].append(mutant)
    return by_line


def run(root: Path, *arguments: str, limit_s: float) -> tuple[int | None, str]:
    """Runs Python in a folder whose packages come first; None: it took longer than it may."""
    environment = {key: text for key, text in os.environ.items() if key not in ("CI", "PYTHONPATH")}
    environment |= {"PYTHONPATH": f"{root}:{root}/.plugins", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return code, output.read()


def copied(root: Path) -> None:
    """A copy of what git knows of the repository, and what is put into its pytest."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, root / name)
    root.chmod(0o777)  # tests start processes as other users
    (root / ".plugins").mkdir()
    (root / ".plugins/mutant_times.py").write_text(TIMES)
    (root / ".plugins/mutant_contexts.py").write_text(CONTEXTS)


class Coverage:
    """Which tests executed a line, and how long each of them takes."""

    def __init__(self, root: Path, paths: list[str]) -> None:
        plugins = ("-p", "mutant_times", "-p", "mutant_contexts", "-s")
        include = ",".join(f"{root}/{package}/*" for package in PACKAGES)
        settings = CONFIGURATION.format(include=include, root=root)
        (root / ".coveragerc").write_text(settings)
        code, output = run(root, "-m", "coverage", "run", *PYTEST, *plugins, *paths, limit_s=1800)
        self.seconds = {
            name: float(seconds)
            for name, seconds in re.findall(rf"^@({NODEID})\|([\d.e-]+)$", output, re.MULTILINE)
        }
        if not self.seconds:
            sys.exit(f"no test passed (exit {code}):\n{output[-3000:]}")
        run(root, "-m", "coverage", "combine", "-q", limit_s=300)
        run(root, "-m", "coverage", "json", "--show-contexts", "-q", "-o", "c.json", limit_s=300)
        self._files = json.loads((root / "c.json").read_text())["files"]
        print(f"{len(self.seconds)} tests passed", flush=True)

    def tests(self, mutant: Mutant, patience_s: float) -> list[str]:
        """Those that executed its line, the quickest first, as many as fit."""
        lines = self._files.get(mutant.path, {}).get("contexts", {})
        names = self._names(lines.get(str(mutant.line), []))
        if not names and mutant.line in map(int, lines):  # while it was imported
            names = self._names(name for line in lines.values() for name in line)
        return self.quickest(names, patience_s)

    def _names(self, contexts: Iterable[str]) -> set[str]:
        """Tests that passed; a child process's context ends with the test's phase."""
        return {re.sub(r" \(\w+\)$", "", one) for one in contexts} & {*self.seconds}

    def quickest(self, names: Iterable[str], patience_s: float) -> list[str]:
        """The quickest tests first, as many as fit."""
        chosen, left_s = [], patience_s
        for name in sorted(names, key=lambda name: (self.seconds[name], name)):
            left_s -= self.seconds[name]
            if left_s > 0:
                chosen.append(name)
        return chosen


def nearest(root: Path, mutant: Mutant, passed: set[str]) -> list[str]:
    """Tests that passed, of files that name a mutant's module."""
    module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    named = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    paths = {name.partition("::")[0] for name in passed}
    near = {path for path in paths if named.search((root / path).read_text(encoding="utf-8"))}
    return [name for name in passed if name.partition("::")[0] in near]


def noticed_by(root: Path, mutant: Mutant, coverage: Coverage, patience_s: float) -> str | None:
    """The test that fails, or does not end, with a mutant; None without one."""
    path = root / mutant.path
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.text, encoding="utf-8")
    try:
        executed = coverage.tests(mutant, patience_s)
        near = {*nearest(root, mutant, {*coverage.seconds})} - {*executed}
        for tests in (executed, coverage.quickest(near, patience_s)):
            if not tests:
                continue
            code, output = run(root, *PYTEST, "-x", "--tb=no", *tests, limit_s=3 * patience_s)
            failed = re.search(rf"^(?:FAILED|ERROR) ({NODEID})", output, re.MULTILINE)
            if code is None:
                return "one that does not end"
            if code not in (0, 5, None):
                return failed[1].partition(" - ")[0] if failed else f"pytest's exit {code}"
        return None
    finally:
        path.write_text(original, encoding="utf-8")


def _tree(source: str) -> str:
    """What a source means: `1e30` and `1e+30` are one number."""
    return ast.dump(ast.parse(source))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("room", nargs="+", help="a folder or file of the product")
    parser.add_argument("--tests", nargs="*", default=[], help="more tests than the room's own")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--patience", type=float, default=30, help="seconds of tests per mutant")
    options = parser.parse_args()
    print(f"--seed {options.seed}", flush=True)
    chance = random.Random(options.seed)
    paths = [path for room in options.room for path in sorted(REPOSITORY.glob(f"{room}/**/*.py"))]
    paths += [REPOSITORY / room for room in options.room if room.endswith(".py")]
    lines = [found for path in paths for found in mutants(path).values()]
    chosen = [
        chance.choice(found) for found in chance.sample(lines, min(options.count, len(lines)))
    ]
    listed = [tuple(line.split(" | ")[:3]) for line in EQUIVALENT.read_text().splitlines()]
    rooms = {re.sub(r"/[^/]*\.py$", "", room) for room in options.room}
    own = [f"tests/{room}" for room in sorted(rooms) if (REPOSITORY / f"tests/{room}").exists()]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        copied(root)
        coverage = Coverage(root, [*own, *options.tests])
        for mutant in chosen:
            test, original = None, (REPOSITORY / mutant.path).read_text(encoding="utf-8")
            same = mutant.key in listed or _tree(mutant.text) == _tree(original)
            if not same:
                test = noticed_by(root, mutant, coverage, options.patience)
            verdict = "equivalent" if same else "noticed" if test else "SURVIVED"
            counts[os.path.dirname(mutant.path)][verdict] += 1
            print(f"{verdict:10} {mutant}" + (f"  ({test})" if test else ""), flush=True)
    print("\n| room | mutants | noticed | |\n|---|--:|--:|--:|")
    for room, count in sorted(counts.items()):
        total = count["noticed"] + count["SURVIVED"]
        rate = f"{100 * count['noticed'] / total:.0f} %" if total else ""
        print(f"| {room} | {total} | {count['noticed']} | {rate} |")


if __name__ == "__main__":
    main()
