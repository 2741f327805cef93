"""An operator's session in a terminal of 80x24, as docs/operate/zeusctl.md shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages.following import DOCS, shapes
from tests.snippets import every
from tests.support import RunningDaemon, running_daemon, wait_for, zeusctl_line
from tests.tmux import Tmux, tmux

pytestmark = pytest.mark.needs("tmux")

PAGE = DOCS / "operate" / "zeusctl.md"

TRAINING = """
import sys
from zeus_ipc import Client
from zeus_common.simulation import SimulatedWork
client = Client(sys.argv[1])
node = client.node()
client.set_power_limit(node.gpus[0].uuid, 125_000)
name = "nsdi23/v100/imagenet/resnet50/adadelta/32"
works = [SimulatedWork(node.simulated, [gpu.uuid], name) for gpu in node.gpus]
for work in works:
    work.launch(1e6)
input()
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A node whose GPUs a job uses, which has lowered the power limit of the first."""
    (tmp_path / "train.py").write_text(TRAINING)
    with running_daemon("--simulate", "4xv100-pcie", gpus=4) as daemon, daemon.client() as client:
        python = Path(sys.executable).with_name("python")  # as the page has it
        command = [python, "train.py", daemon.socket]
        job = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE)
        uuids = [gpu.uuid for gpu in client.node().gpus]

        def busy() -> bool:
            states = client.state(uuids)
            clocks = [states[uuid].gpu_clock_mhz or 0 for uuid in uuids]
            limited_ms = [states[uuid].limited_ms.get("power", 0) for uuid in uuids]
            return clocks[0] < 900 and min(clocks) > 700 and min(limited_ms) > 9950  # of 10 s

        wait_for(busy, "the job")
        yield daemon
        job.kill()
        job.communicate()


def shown(window: Tmux, command: str) -> str:
    """What a command shows: all that scrolled by, or one screen of `top`."""
    window.run("clear-history", "-t", "t")
    if command == "zeusctl top":
        window.type("clear; zeusctl top", "Enter")
        window.shows("q quit", "HOLDS", "power limit", " 125 ")
        screen = window.screen()
        window.type("q")
        wait_for(lambda: "q quit" not in window.screen(), "top to end")
        return screen
    end = f"-- end of {command}"
    window.type(f"clear; {command}; echo '-- end'' of {command}'", "Enter")
    wait_for(lambda: f"\n{end}" in window.run("capture-pane", "-pS", "-", "-t", "t"), command)
    return window.run("capture-pane", "-pS", "-", "-t", "t").partition(f"\n{end}")[0]


def commands() -> dict[str, list[str]]:
    """The session: what is typed, and what is shown."""
    source = next(one.source for one in every(PAGE) if one.language == "console")
    parts = [one.partition("\n") for one in source.split("$ ")[1:]]
    return {typed: text.splitlines() for typed, _, text in parts}


def test_a_session_at_80x24(node: RunningDaemon) -> None:
    found = commands()
    assert list(found) == [
        *("zeusctl status", "zeusctl top", "zeusctl show 0", "sudo zeusctl reset 0"),
        "zeusctl status 0",
    ]
    assert max(len(line) for lines in found.values() for line in lines) <= 80
    with tmux("PS1='$ ' bash --norc", (80, 24), ZEUSD_SOCK_PATH=node.socket) as window:
        window.type(f'sudo() {{ "$@"; }}; zeusctl() ( {zeusctl_line()}; )', "Enter")
        for command, lines in found.items():
            screen = shown(window, command)
            # A longer pid or user moves a part of the last column to a line of its own.
            printed = shapes(screen) + shapes(re.sub(r"\n {40,}", " ", screen))
            # A line that is cut differs by the length of a path.
            for line in shapes("\n".join(one for one in lines if "…" not in one)):
                assert line in printed, f"{command}: {line!r} is not in\n{screen}"
