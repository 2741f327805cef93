"""Every fenced block of the documentation does what it says.

Commands are run in bash on a simulated node, or have a reason why not and are at least read by the
commands themselves; Python is run by the test that knows what the page takes for granted; data is
parsed by what would read it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests import snippets
from tests.docs.command_lines import complaint, simple_commands
from tests.snippets import ROOT, Block
from tests.support import RunningDaemon, running_daemon, zeusctl_line
from zeus_ipc.codec import decode_reply, encode
from zeusctl import entities
from zeusctl.columns import Columns, with_headings
from zeusd.config import load

PAGES = snippets.pages()
BLOCKS = [block for page in PAGES for block in snippets.every(page)]

PYTHON = {
    "README.md": ("tests.docs.pages.test_training",),
    "docs/migrating.md": ("tests.docs.pages.test_migrating",),
    "docs/tutorial.md": ("tests.docs.pages.test_tutorial",),
    "docs/explain/measuring.md": ("tests.docs.pages.test_measuring",),
    "docs/integrate/own_scheduler.md": ("tests.docs.pages.test_extending",),
    "docs/integrate/own_selector.md": ("tests.docs.pages.test_extending",),
    "docs/serve/clocks.md": ("tests.zeus.serving.test_clock_control",),
    "docs/train/batch_size_optimizer.md": ("tests.docs.pages.test_batch_size",),
    "docs/train/distributed.md": ("tests.docs.pages.test_extending",),
    "docs/train/metrics.md": ("tests.docs.pages.test_measuring",),
    "docs/train/measuring_only.md": (
        "tests.zeus.measure.test_docs",
        "tests.zeus.measure.test_trainers",
    ),
    "docs/train/huggingface.md": ("tests.zeus.power_limit.test_huggingface",),
    "docs/train/lightning.md": ("tests.zeus.power_limit.test_lightning",),
    "docs/train/pipeline_frequency.md": ("tests.zeus.pipeline_frequency.test_command",),
    "docs/train/pipeline_frequency_client.md": ("tests.docs.pages.test_measuring",),
    "docs/train/pipeline_frequency_integration.md": (
        "tests.docs.pages.test_pipeline_frequency_integration",
    ),
    "docs/train/pipeline_frequency_server.md": (
        "tests.zeus.pipeline_frequency.server.test_own_scheduler",
    ),
    "docs/train/power_limit.md": ("tests.docs.pages.test_training",),
    "docs/train/simulating.md": ("tests.docs.pages.test_simulating",),
    "docs/train/training.md": ("tests.docs.pages.test_training",),
    "docs/train/zeus_run.md": ("tests.zeus.run.test_dataloader",),
    "examples/batch_size_optimizer/README.md": ("tests.docs.pages.test_measuring",),
    "examples/power_limit_optimizer/README.md": ("tests.docs.pages.test_measuring",),
}
"""The tests that run each page's Python, all of it."""

CHOOSING = {"tests.docs.pages.test_training", "tests.docs.pages.test_measuring"}
"""Tests that choose among a page's blocks: what they run is in their `BLOCKS`."""

COMMANDS = {
    "docs/tutorial.md": "tests.docs.pages.test_tutorial",
    "docs/integrate/own_language.md": "tests.docs.pages.test_own_language",
}
"""The tests that run commands of pages that need more than a node."""

CHANGES_THE_MACHINE = ("apt", "apt-get", "docker", "pip", "podman", "systemctl", "usermod")
TOOLS = {
    "sudo": """case "$1 $2" in
"zeusd restore") exec "$@" --state-dir "$ZEUSD_SOCK_PATH.state" ;;  # not this machine's
zeusd*|zeusctl*) exec "$@" ;;
*) echo "no test does: $*"; exit 1 ;;
esac""",
    **dict.fromkeys(CHANGES_THE_MACHINE, 'echo "no test does this"; exit 1'),
}
"""What stands in for the machine's own while pages are followed."""

LANGUAGES = {"python", "sh", "toml", "json", "yaml", "hex", "text", "console", ""}
OURS = r"(?:zeusctl|zeusd|zeusd-exporter|zeusd-kubernetes|zeus-fleet|bso|python -m zeus[\w.]*)"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(*languages: str) -> list[Any]:
    """Parameters: the blocks in these languages."""
    return [
        pytest.param(block, id=f"{name_of(block.path)}:{block.line}")
        for block in BLOCKS
        if block.language in languages
    ]


def test_each_is_of_a_kind_that_is_checked() -> None:
    assert [f"{one}: {one.language}" for one in BLOCKS if one.language not in LANGUAGES] == []
    assert [name_of(page) for page in PAGES if "```" in snippets.without_fences(page)] == []


# ------------------------------------------------------------------------------------------ Python


def test_each_python_block_is_run_by_a_test() -> None:
    with_python = {name_of(one.path) for one in BLOCKS if one.language == "python"}
    assert with_python == PYTHON.keys()
    for page, modules in PYTHON.items():
        chosen: set[int] = set()
        everything = False
        for name in modules:
            path = ROOT / f"{name.replace('.', '/')}.py"
            source = path.read_text()
            assert Path(page).stem in source, f"{path} runs nothing of {page}"
            if name in CHOOSING:
                found = import_module(name).BLOCKS
                chosen |= {one.line for one in found if name_of(one.path) == page}
            else:
                everything = True
        if not everything:
            assert chosen == {one.line for one in snippets.of(ROOT / page)}, page


# ---------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_are_bash_and_their_options_are_there(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.source, text=True, check=True)
    assert [found for one in simple_commands(block.source) if (found := complaint(one))] == []
    assert list(missing_paths(block)) == []
    for test in re.findall(r"\btests/[\w/.]+", block.why_not):
        assert (ROOT / test).exists(), f"{block} is said to be run by {test}"


@pytest.mark.parametrize("block", blocks("console", "text", ""))
def test_commands_with_a_prompt_are_right_too(block: Block) -> None:
    typed = re.findall(r"^\$ (.*(?:\\\n.*)*)", block.source, re.MULTILINE)
    for line in typed:
        assert [found for one in simple_commands(line) if (found := complaint(one))] == []


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES])
def test_commands_in_the_text_are_right_too(page: Path) -> None:
    for code in re.findall(rf"(?<!`)`({OURS} [^`\n]+)`", snippets.without_fences(page)):
        # As in a synopsis: parts that are optional, repeated, or placeholders.
        for one in simple_commands(re.sub(r"[][]|\.\.\.|…", "", code)):
            found = complaint(one)
            filled_in = any(re.fullmatch("[A-Z]+", word) for word in one)
            if "Missing argument" not in found and ("No such option" in found or not filled_in):
                assert not found, code


def missing_paths(block: Block) -> Iterator[str]:
    """Paths in a block that the repository does not have."""
    top = "examples|scripts|docs|systemd|benchmarks|tests|docker|packaging"
    for path in re.findall(rf"(?<![\w/@.-])(?:{top})/[\w./-]*\w", block.source):
        if not (ROOT / path).exists():
            yield path
    of_example = name_of(block.path).startswith("examples/")
    folders = [block.path.parent] if of_example else []
    for words in simple_commands(block.source):
        if words[0] == "cd":
            folders = [ROOT / words[-1]]
        script = next((one for one in words[1:] if one.endswith(".py")), "/")
        ours = words[0] in ("python", "torchrun") and "/" not in script
        if ours and folders and not (folders[0] / script).exists():
            yield script


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "4xv100-pcie", gpus=4) as one:
        yield one


def sessions() -> list[Any]:
    """Parameters: pages with commands that a node is enough for."""
    found = {one.path for one in BLOCKS if one.language == "sh" and not one.why_not}
    return [
        pytest.param(page, id=name_of(page))
        for page in PAGES
        if page in found and name_of(page) not in COMMANDS
    ]


@pytest.mark.parametrize("page", sessions())
def test_commands_run(page: Path, daemon: RunningDaemon, tmp_path: Path) -> None:
    """Runs all commands of a page in one shell, in a copy of the files that they read."""
    work = tmp_path / "zeusd"
    for name in ("examples", "systemd", "docs"):
        shutil.copytree(ROOT / name, work / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, source in {**TOOLS, "zeusctl": zeusctl_line()}.items():
        (tools / name).write_text(f"#!/bin/sh\n{source}\n")
        (tools / name).chmod(0o755)
    places = [str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": ":".join(places), "ZEUSD_SOCK_PATH": daemon.socket}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    script = "set -euo pipefail\n" + "".join(
        f"echo '{one}' >&2\n{one.source}\n" for one in snippets.of(page, "sh") if not one.why_not
    )
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=work / name_of(page.parent) if page.name == "README.md" else work,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout


def test_commands_of_the_other_pages_are_run_by_their_tests() -> None:
    for page, module in COMMANDS.items():
        assert Path(page).stem in (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert any(not one.why_not for one in snippets.of(ROOT / page, "sh"))


# -------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml_is_what_zeusd_takes(block: Block, tmp_path: Path) -> None:
    if block.why_not:
        tomllib.loads(block.source)
        return
    path = tmp_path / "zeusd.toml"
    path.write_text(block.source)
    load(str(path))


@pytest.mark.parametrize("block", blocks("json", "yaml"))
def test_json_and_yaml_can_be_parsed(block: Block) -> None:
    if block.language == "json":
        json.loads(block.source)
    else:
        assert [one for one in yaml.safe_load_all(block.source) if one is not None]


@pytest.mark.parametrize("block", blocks("hex"))
def test_bytes_are_messages(block: Block) -> None:
    lines = block.source.splitlines()
    data = bytes.fromhex("".join(line.partition("#")[0] for line in lines))
    assert encode(decode_reply(data)) == data


LISTS: list[Columns[Any]] = [entities.GPU, entities.KNOWN_GPU, entities.LEASE, entities.CEILING]
LISTS += [entities.PROCESS, entities.EVENT]
TABLES = {tuple(one.heading for one in there): there for there in map(with_headings, LISTS)}


def test_tables_in_samples_are_those_of_zeusctl_and_line_up() -> None:
    seen = 0
    for page in PAGES:
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines):
            columns = TABLES.get(tuple(re.split(r"\s{2,}", line.strip())))
            if columns is None:
                continue
            for row in lines[number + 1 :]:
                if not re.match(r" *(\d|GPU-|[A-Z][a-z]{2} \d)", row):
                    break
                seen += 1
                for column in columns[1:]:
                    start = line.index(f"  {column.heading}")
                    end = start + 2 + len(column.heading)
                    gap = row[end : end + 2] if column.right else row[start : start + 2]
                    assert not gap.strip(), f"{page}: {column.heading} of: {row}"
    assert seen > 20
