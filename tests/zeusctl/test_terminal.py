"""Every verb in a terminal: pseudo-terminals, tmux, and the shells that complete its words."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from fcntl import ioctl
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from tests.support import TIMEOUT_S, RunningDaemon, wait_for, zeusctl_line
from tests.tmux import tmux
from tests.zeusctl.conftest import python
from zeus_common.simulation import SimulatedWork
from zeusctl.cli import VERBS, cli

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A program in its own terminal.

    Attributes:
        text: What the terminal has shown so far, with its escapes.
    """

    def __init__(self, command: list[str], env: dict[str, str], size: tuple[int, int]) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", size[1], size[0], 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **env},
            start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def read(self, timeout_s: float = 0.1) -> str:
        """The screen's content."""
        with contextlib.suppress(OSError):
            while select.select([self._master], [], [], timeout_s)[0]:
                data = os.read(self._master, 65536)
                if not data:
                    break
                self.text += data.decode(errors="replace")
        return self.text

    def expect(self, part: str) -> None:
        """Waits until something is shown."""
        wait_for(lambda: part in ESCAPE.sub("", self.read()), f"{part!r} in the terminal")

    def group(self) -> int:
        """The process group in the foreground, which gets what keys send."""
        return os.tcgetpgrp(self._master)

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        """Waits for the end; the exit code."""
        end = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.05)
        self.read()
        return self.process.wait(1)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def terminal(
    daemon: RunningDaemon, *arguments: str, size: tuple[int, int] = (120, 40), **env: str
) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "zeusctl", *arguments]
    found = Terminal(command, {"ZEUSD_SOCK_PATH": daemon.socket, **env}, size)
    try:
        yield found
    finally:
        found.close()


SESSIONS: dict[str, tuple[tuple[str, ...], str, str, int]] = {
    "status": (("status",), "", "SITE", 0),
    "gpus": (("gpus",), "", "CONTROLS", 0),
    "show": (("show", "0"), "", "You may change:", 0),
    "processes": (("processes",), "", "no process uses these GPUs", 0),
    "leases": (("leases",), "", "no leases", 0),
    "top": (("top", "-d", "0.2"), "q", "POWER, 2 MIN", 0),
    "set": (("set", "0", "-p", "150"), "\x03", "held until Ctrl-C", 130),
    "reset": (("reset", "all"), "", "reset 12 controls on 4 GPUs", 0),
    "release": (("release",), "", "nobody holds a lease", 0),
    "receipt": (("receipt", "--compare", "a.json", "b.json"), "", "'a.json' does not exist", 2),
    "measure": (("measure", "--", "sh", "-c", "exit 3"), "", "the command ended with code 3", 3),
    "record": (("record", "0", "-o", "samples.csv"), "\x03", "samples in samples.csv", 130),
    "plot": (("plot", "0", "-o", "p.svg", "--last", "30s"), "", "points in p.svg", 0),
    "audit": (("audit", "-n", "5"), "", "WHO, WHY AND RESULT", 0),
    "energy": (("energy",), "", "GPU counters", 0),
    "allocate": (("allocate", "3", "--job", "7"), "", "job 7 holds GPU 3", 0),
    "allocations": (("allocations",), "", "HELD BY", 0),
    "deallocate": (("deallocate", "--job", "7"), "", "1 GPU released", 0),
    "forget": (("forget", "--user", "7654321"), "", "in 0 accounts", 0),
    "doctor": (("doctor",), "", "no restore is pending", 0),
    "probe": (
        ("probe", "--simulate", "v100", "--seconds", "1", "--calls", "1", "--no-load"),
        "",
        "the driver's answers do not contradict each other",
        0,
    ),
    "exercise": (("exercise", "0"), "n\n", "of GPU 0 (Tesla V100-PCIE-16GB) to many values?", 1),
    "quiesce": (("quiesce",), "", "has closed the driver", 0),
    "resume": (("resume",), "", "reopened the driver: 4 GPUs", 0),
    "schema": (("schema", "status"), "", '"title": "StatusReport"', 0),
    "completion": (("completion", "bash"), "", "_ZEUSCTL_COMPLETE", 0),
    "man": (("man", "--write", "pages"), "", "pages in pages", 0),
}
"""By verb: the command line, what is typed last, what is shown, and the exit code."""


def test_tables_fit_a_terminal_of_80_columns(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Lines of one terminal row each; columns that have no room are named."""
    with daemon.client() as client:
        node = client.node()
        client.set_power_limit(node.gpus[2].uuid, 200_000)
        client.set_ceiling(node.gpus[1].uuid, "fleet", 200_000, ttl_s=600, fallback_mw=150_000)
        verbs = ("status -p", "gpus", "leases", "processes", "audit -n 9", "show 2", "energy")
        work = SimulatedWork(node.simulated or "", [node.gpus[2].uuid], "model/compute")
        with contextlib.closing(work):
            work.launch(1e6)
            wait_for(lambda: client.processes(node.gpus[2].uuid)[node.gpus[2].uuid].processes, "it")
            asked = {verb.split()[0]: (verb.split(), {}) for verb in verbs}
            for verb, (text, code) in shown_by(daemon, tmp_path, asked, (80, 24)).items():
                assert code == 0
                lines = ESCAPE.sub("", text).splitlines()
                assert max(map(len, lines)) <= 80, verb
                assert verb != "gpus" or "(no room for CONTROLS, PCI, MEMORY, SITE)" in lines
        wait_for(lambda: not client.processes(node.gpus[2].uuid)[node.gpus[2].uuid].processes, "it")
        client.set_ceiling(node.gpus[1].uuid, "fleet", None)
        client.release()


def test_there_is_a_session_for_every_verb() -> None:
    assert set(SESSIONS) == set(VERBS)


PROGRAM = """
import json, os, sys
os.chdir(sys.argv[1])
from zeusctl.cli import main
for name, (arguments, env) in json.loads(sys.argv[2]).items():
    os.environ.update(env)
    try:
        main(arguments)
    except SystemExit as end:
        print("\\x1e", name, end.code, flush=True)
"""
"""Runs command lines one after the other in itself."""


def shown_by(
    daemon: RunningDaemon,
    folder: Path,
    lines: dict[str, tuple[Sequence[str], dict[str, str]]],
    size: tuple[int, int] = (120, 40),
) -> dict[str, tuple[str, int]]:
    """What each of some command lines shows in a terminal, and its exit code: one terminal, and one
    process in it, for all of them.

    Args:
        daemon: The node.
        folder: Where the process runs.
        lines: By name: the command line, and what is added to its and the next ones' environment.
        size: Columns and rows of the terminal.
    """
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(lines)]
    session = Terminal(command, {"ZEUSD_SOCK_PATH": daemon.socket}, size)
    try:
        assert session.wait() == 0, session.text
    finally:
        session.close()
    found = re.findall(r"(.*?)\x1e (\S+) (\d+)\r\n", session.text, re.DOTALL)
    return {name: (text, int(code)) for text, name, code in found}


@pytest.fixture(scope="module")
def untyped(
    daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, int]]:
    """What the verbs show to which nothing is typed."""
    folder = tmp_path_factory.mktemp("untyped")
    lines = {verb: (line, {}) for verb, (line, keys, _, _) in SESSIONS.items() if not keys}
    found = shown_by(daemon, folder, lines)
    pages = {one.name for one in (folder / "pages").iterdir()}
    assert {f"zeusctl-{name}.1" for name in VERBS} <= pages
    return found


@pytest.mark.parametrize("verb", [verb for verb in SESSIONS if not SESSIONS[verb][1]])
def test_each_verb_in_a_terminal(verb: str, untyped: dict[str, tuple[str, int]]) -> None:
    _, _, shown, wanted = SESSIONS[verb]
    text, code = untyped[verb]
    assert code == wanted, text
    plain = ESCAPE.sub("", text)
    assert shown in plain
    assert "Traceback" not in plain


@pytest.mark.parametrize("verb", [verb for verb in SESSIONS if SESSIONS[verb][1]])
def test_each_verb_to_which_keys_are_typed(
    daemon: RunningDaemon, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, keys, shown, code = SESSIONS[verb]
    with terminal(daemon, *arguments) as session:
        if verb == "record":
            samples = Path("samples.csv")
            wait_for(lambda: samples.exists() and samples.read_text().count("\n") > 1, "a row")
        else:
            session.expect(shown)
        session.type(keys)
        assert session.wait() == code, session.text
        plain = ESCAPE.sub("", session.text)
        assert shown in plain
        assert "Traceback" not in plain
        if verb == "top":
            assert session.text.rindex("\x1b[?1049l") > session.text.rindex("\x1b[?1049h"), (
                "the terminal's own screen is back"
            )
            assert session.text.rindex("\x1b[?25h") > session.text.rindex("\x1b[?25l")


def test_a_terminal_is_coloured_unless_it_must_not_be(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    environments = {
        "colour": {},
        "dumb": {"TERM": "dumb"},
        "plain": {"TERM": "xterm-256color", "NO_COLOR": "1"},
    }
    lines = {name: (("doctor",), env) for name, env in environments.items()}
    shown = shown_by(daemon, tmp_path, lines)
    assert [code for _, code in shown.values()] == [0, 0, 0]
    assert "\x1b[32mok" in shown["colour"][0]
    assert "\x1b[" not in shown["plain"][0]
    assert "\x1b[" not in shown["dumb"][0]


def test_a_shell_stops_and_continues_a_command_in_its_wrapper(daemon: RunningDaemon) -> None:
    command = f"{shlex.quote(sys.executable)} -m zeusctl set 1 -p 150 --"
    env = {"ZEUSD_SOCK_PATH": daemon.socket, "PS1": "$ "}
    shell = Terminal(["bash", "--norc", "--noediting", "-i"], env, (120, 40))
    try:
        shell.type(f"{command} sh -c 'echo run''ning; sleep 100'\n")
        shell.expect("running")
        for _ in range(2):
            shell.type("\x1a")
            shell.expect("Stopped")
            shell.text = ""
            shell.type("kill -CONT %1; sleep 0.1; jobs\n")
            shell.expect("Running")
            shell.type("fg\n")
            # The shell says so before it gives the terminal away, and ignores what comes meanwhile.
            wait_for(lambda: shell.group() != shell.process.pid, "the command to have the terminal")
        shell.type("\x03")
        shell.type("echo code $?\n")
        shell.expect("code 130")
    finally:
        shell.close()


def test_confirming_at_the_terminal(daemon: RunningDaemon) -> None:
    with terminal(daemon, "set", "0", "-p", "150", "--confirm-within", "60s") as session:
        session.expect("Keep it? [y/N, within 60 s]")
        session.type("y\n")
        session.expect("held until Ctrl-C")
        session.type("\x03")
        assert session.wait() == 130


@pytest.mark.needs("tmux")
def test_top_shows_load_and_leases_resizes_and_quits(daemon: RunningDaemon) -> None:
    """Under tmux, as people run it."""
    command = f"{shlex.quote(sys.executable)} -m zeusctl top -d 0.2; echo ended $?; sleep 100"
    with tmux(command, (150, 30), ZEUSD_SOCK_PATH=daemon.socket) as window:
        with daemon.client() as client:
            info = client.node()
            assert info.simulated is not None
            uuid = info.gpus[0].uuid
            work = SimulatedWork(
                info.simulated, [uuid], "nsdi23/v100/imagenet/resnet50/adadelta/32"
            )
            work.launch(100_000)
            client.set_power_limit(uuid, 150_000)
            window.shows(
                *("━━━", "150 W", "▂", "power limit", str(os.getpid()), "POWER, 2 MIN", "100 %")
            )

            def marked() -> bool:
                rows = window.screen().splitlines()
                row = next((line for line in rows if line.strip().startswith("0 ")), "")
                return 0 <= row.find("|") < row.rfind(" 150 ")

            wait_for(marked, "the limit in the GPU's row, and its mark in the bar")
            work.close()
        window.shows("0 leases", "0 processes")
        window.run("resize-window", "-t", "t", "-x", "80", "-y", "20")

        def narrow() -> bool:
            """All of it in one look: until top has drawn again, the old screen is shown, cut."""
            now = window.screen()
            # A narrow terminal has no room for the energy.
            return "POWER" in now and "q quit" in now and "ENERGY" not in now

        wait_for(narrow, "the screen for the new width")
        window.type("q")
        window.shows("ended 0")


def test_without_textual_top_says_how_to_have_it(daemon: RunningDaemon, tmp_path: Path) -> None:
    (tmp_path / "textual.py").write_text("raise ImportError('not installed')")
    with terminal(daemon, "top", PYTHONPATH=str(tmp_path)) as session:
        assert session.wait() == 1
        assert "-m pip install textual" in " ".join(session.text.split())
        assert "\x1b[?1049h" not in session.text


def test_without_a_terminal_top_prints_repeatedly(daemon: RunningDaemon) -> None:
    command = [python(), "-m", "zeusctl", "top", "-d", "0.5", "-n", "2", "--json"]
    env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0
    first, second = (json.loads(line) for line in ran.stdout.splitlines())
    assert first["schema"] == "zeusctl.status/1"
    at, later = (
        datetime.fromisoformat(one["at"].replace("Z", "+00:00")) for one in (first, second)
    )
    assert later - at > timedelta(seconds=0.4), "and waits in between"


# ------------------------------------------------------------------------------------------- shells


SHELLS = ["bash", *(pytest.param(one, marks=pytest.mark.needs(one)) for one in ("zsh", "fish"))]


def complete(daemon: RunningDaemon, shell: str, tmp_path: Path, words: str) -> list[str]:
    """The completions of a real shell with the script of `zeusctl completion`."""
    env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
    bin_folder = tmp_path / "bin"
    env["PATH"] = f"{bin_folder}:{env['PATH']}"
    path = tmp_path / f"completion.{shell}"
    if not path.exists():
        bin_folder.mkdir()
        program = bin_folder / "zeusctl"
        program.write_text(f"#!/bin/sh\n{zeusctl_line()}\n")
        program.chmod(0o755)
        command = [str(program), "completion", shell]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        path.write_text(ran.stdout)
    if shell == "bash":
        source = (
            f"source {path}; COMP_WORDS=({words} ''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
            "_zeusctl_completion zeusctl; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
    elif shell == "fish":
        source = f"source {path}; complete -C '{words} '"
    else:
        # Outside of a widget zsh completes nothing, so the script's words are printed instead.
        shows = "for one; do [[ $one == completions* ]] && print -rl -- ${(P)one}; done"
        source = (
            f"compdef() {{ true }}; _describe() {{ {shows} }}; compadd() {{ {shows} }}; "
            f"words=({words} ''); CURRENT=${{#words}}; source {path}; _zeusctl_completion"
        )
    ran = subprocess.run(
        [shell, *(["-f"] if shell == "zsh" else []), "-c", source],
        capture_output=True,
        text=True,
        env=env,
    )
    return [re.split(r"[\t:]", line)[0] for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_verbs_and_gpus(daemon: RunningDaemon, shell: str, tmp_path: Path) -> None:
    assert {"status", "set", "quiesce"} <= set(complete(daemon, shell, tmp_path, "zeusctl"))
    assert {"all", "0", "3"} <= set(complete(daemon, shell, tmp_path, "zeusctl show"))


def test_gpus_reports_and_after_two_dashes_commands_are_completed(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "zeustrain").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    complete = ShellComplete(cli, {}, "zeusctl", "_ZEUSCTL_COMPLETE")
    with daemon.client() as client:
        uuids = [gpu.uuid for gpu in client.node().gpus]
    for words, begun, wanted in (
        ("audit --gpus", "", ["all", "0", "1", "2", "3"]),
        ("audit --gpus", "1,", ["1,0", "1,1", "1,2", "1,3"]),
        ("audit --gpus", "gpu-", uuids),
        ("schema", "le", ["leases"]),
        ("man", "re", ["receipt", "record", "release", "reset", "resume"]),
    ):
        found = complete.get_completions(words.split(), begun)
        assert sorted(one.value for one in found) == sorted(wanted)
    for words in (["set", "0", "--"], ["measure", "--"]):
        found = complete.get_completions(words, "zeust")
        program, path = [(one.value, one.type) for one in found]
        assert (program, path) == (("zeustrain", "plain"), ("zeust", "file"))
        (argument,) = complete.get_completions([*words, "python"], "tra")
        assert (argument.value, argument.type) == ("tra", "file")


@pytest.mark.needs("groff")
def test_manual_pages_are_clean_and_name_every_option(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    command = [python(), "-m", "zeusctl", "man", "--write", str(tmp_path)]
    subprocess.run(command, check=True)
    pages = sorted(tmp_path.iterdir())
    assert len(pages) == len(VERBS) + 1
    for page in pages:
        ran = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z", str(page)], capture_output=True, text=True
        )
        assert (ran.returncode, ran.stderr) == (0, ""), page.name
    shown = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-cbou", str(tmp_path / "zeusctl-set.1")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for part in (
        "--power-limit",
        "--confirm-within",
        "zeusctl set 0-3 --power-limit 200 -- python",
    ):
        assert part in " ".join(shown.split()), part
    overview = (tmp_path / "zeusctl.1").read_text()
    assert "EXIT STATUS" in overview
    assert "ZEUSD_SOCK_PATH" in overview
