"""Follows a page as its reader would: saves its programs, and types its commands in one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.snippets import ROOT, Block, every
from zeus_common.text import user_name

DOCS = ROOT / "docs"

_NEXT = "@@@ next block"


def follow(page: Path, folder: Path) -> dict[int, str]:
    """Follows a page in an empty folder.

    Args:
        page: Its `sh` blocks are one session, ended by the first command that fails. Before it
            begins, blocks with a title are files.
        folder: Where that is.

    Returns:
        What each `sh` block printed, by its line.
    """
    commands: list[Block] = []
    for block in every(page):
        if block.title:
            (folder / block.title).write_text(block.source, encoding="utf-8")
        elif block.language == "sh" and not block.why_not:
            commands.append(block)
    assert commands, f"{page} has no commands"
    session = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\nset -e\n"
    session += "".join(f"echo '{_NEXT}'\n{block.source}\n" for block in commands)
    path = os.pathsep.join([*map(str, _programs(folder)), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}
    environment.pop("ZEUSD_SOCK_PATH", None)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    ran = subprocess.run(
        ["bash", "-c", session],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    outputs = ran.stdout.split(f"{_NEXT}\n")[1:]
    last = commands[len(outputs) - 1].line if outputs else 0
    assert ran.returncode == 0, f"{page.name}:{last} failed:\n{ran.stdout}"
    return {block.line: out for block, out in zip(commands, outputs, strict=True)}


def _programs(folder: Path) -> list[Path]:
    """Folders of the environment's programs.

    No `#!` line can name a Python in a folder whose name has a space: pip has a shell start
    programs there, and zeusd knows them as "python". A link to that folder has no space.
    """
    programs = Path(sys.executable).parent
    if " " not in str(programs):
        return [programs]
    started, link = folder / ".programs", folder / ".environment"
    started.mkdir()
    link.symlink_to(programs.parent)
    for name in ("zeusd", "zeusctl"):
        source = (programs / name).read_text().partition("' '''\n")[2]
        (started / name).write_text(f"#!{link}/bin/python\n{source}")
        (started / name).chmod(0o755)
    return [started, programs]


def shown_after(page: Path) -> dict[int, str]:
    """The `text` block that follows each `sh` block and shows its output, by its line."""
    shown: dict[int, str] = {}
    before: Block | None = None
    for block in every(page):
        if block.language == "text" and before is not None:
            shown[before.line] = block.source
        before = block if block.language == "sh" else None
    return shown


def shapes(output: str) -> list[str]:
    """Its lines without details that vary: numbers, paths, users, widths of columns."""
    found = []
    for line in output.splitlines():
        line = re.sub(r"(?<![\w.])/\S*[\w/]", "PATH", line)
        line = re.sub(rf"\b{re.escape(user_name(os.getuid()))}\b", "root", line)
        line = re.sub(r"GPU-[0-9a-f-]+", "UUID", line)
        process = r"(python|zeusctl)3?(\.\d+)?( \w+\.py)? \d+ \(\w+\)"
        line = re.sub(process, r"\1\3 PID (USER)", line)
        line = re.sub(r"[-+]?\d[\d.:-]*( h| min| s| ms)?( \d+ (min|s))?( [kM]?J\b)?", "N", line)
        found.append(" ".join(line.split()))
    return [line for line in found if line]
