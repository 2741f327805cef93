"""A terminal of tmux, as people run programs in it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from tests.support import wait_for


class Tmux:
    """One window of a tmux server of its own."""

    def __init__(self, **env: str) -> None:
        self._server = f"zeusd-test-{os.getpid()}"
        self._env = {**os.environ, "LC_ALL": "C.UTF-8", **env}

    def run(self, *arguments: str) -> str:
        """Runs a command of tmux."""
        return subprocess.run(
            ["tmux", "-L", self._server, "-f", "/dev/null", *arguments],
            check=True,
            capture_output=True,
            text=True,
            env=self._env,
        ).stdout

    def screen(self) -> str:
        """What is shown, without what has scrolled away."""
        return self.run("capture-pane", "-p", "-t", "t")

    def type(self, *keys: str) -> None:
        """Presses keys, by tmux's names; other words are typed."""
        self.run("send-keys", "-t", "t", *keys)

    def shows(self, *parts: str) -> None:
        """Waits until all of these are shown."""
        wait_for(
            lambda: all(part in self.screen() for part in parts), f"{parts} in {self.screen()}"
        )


@contextlib.contextmanager
def tmux(command: str, size: tuple[int, int], **env: str) -> Iterator[Tmux]:
    """Runs a shell's command in a window of this size: columns and rows."""
    window = Tmux(**env)
    width, height = map(str, size)
    window.run("-u", "new-session", "-d", "-s", "t", "-x", width, "-y", height, command)
    try:
        yield window
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            window.run("kill-server")
