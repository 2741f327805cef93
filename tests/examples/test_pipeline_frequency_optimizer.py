"""examples/pipeline_frequency_optimizer: the commands of its README, on simulated GPUs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.examples.programs import (
    EXAMPLES,
    environment,
    run,
    start_with_torch,
    with_torch,
    without_torch,
)
from tests.support import TIMEOUT_S, RunningDaemon, running_daemon, wait_for

FOLDER = EXAMPLES / "pipeline_frequency_optimizer"
BLOCKING_W = {"a100": 83.64, "a40": 70.38}
SHORT = ("--backend", "gloo", "--duration", "1")


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "4xa100", gpus=4) as running:
        yield running


def locked_mhz(daemon: RunningDaemon) -> list[int | None]:
    """The locked clock of each GPU."""
    with daemon.client() as client:
        uuids = [gpu.uuid for gpu in client.node().gpus]
        states = client.state(uuids)
    clocks = [states[uuid].locked_gpu_clocks_mhz for uuid in uuids]
    return [None if clock is None else clock[1] for clock in clocks]


def clocks_set(daemon: RunningDaemon) -> list[set[str]]:
    """To which clocks programs have locked each GPU so far."""
    with daemon.client() as client:
        uuids = [gpu.uuid for gpu in client.node().gpus]
    records = [one for one in daemon.records("set") if one["control"] == "gpu_clocks"]
    return [{one["new"] for one in records if one["gpu"] == uuid} for uuid in uuids]


def children(pid: int) -> list[int]:
    """The processes that a process has started and that spawned Python again."""
    with contextlib.suppress(OSError):
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(one) for one in pids if "spawn_main" in command_of(int(one))]
    return []


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def gone(pid: int) -> bool:
    """Whether a process has ended; who should have reaped it may be gone as well."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


# ----------------------------------------------------------------------------------- profile_p2p.py


def test_the_power_of_a_blocked_gpu_is_found(daemon: RunningDaemon, tmp_path: Path) -> None:
    with running_daemon("--simulate", "2xa40", gpus=2) as other:
        jobs = {}
        for gpu, node, more in (("a100", daemon, ()), ("a40", other, ("--peer", "sleep"))):
            command = with_torch("profile_p2p.py", *SHORT, "--gpus", "1", "0", *more)
            command += ["--output", str(tmp_path / f"{gpu}.json")]
            jobs[gpu] = subprocess.Popen(
                command,
                cwd=FOLDER,
                env=environment(node.socket),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        for gpu, job in jobs.items():
            output, errors = job.communicate()
            assert job.returncode == 0, errors
            figures = re.findall(r"^(Time \(s\)|Energy \(J\)|Power \(W\)): (\S+)$", output, re.M)
            seconds, joules, watts = (float(figure) for _, figure in figures)
            assert seconds > 0.9
            assert watts == pytest.approx(joules / seconds)
            assert watts == pytest.approx(BLOCKING_W[gpu], rel=0.02)
            written = json.loads((tmp_path / f"{gpu}.json").read_text())
            assert gpu.upper() in written.pop("gpu")
            expected = {"power_w": watts, "time_s": seconds, "energy_j": joules}
            assert written == {**expected, "gpus": [1, 0], "backend": "gloo"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0", "4"], "there is no GPU 4: this process sees 4, and two are needed"),
        (["--gpus", "2", "2"], "--gpus needs two different GPUs"),
        ([], "this node is simulated, and NCCL needs real GPUs; use --backend gloo"),
        (["--duration", "0"], "--duration must be from 0.2 to 3600 seconds, not 0"),
        (["--duration", "nan"], "--duration must be from 0.2 to 3600 seconds, not nan"),
        (["--port", "70000"], "--port must be below 65536, not 70000"),
        (["--output", "/nowhere/p2p.json"], "--output /nowhere/p2p.json cannot be written"),
        (["--backend", "gloo"], 'PyTorch is not installed; pip install "zeusd[torch]"'),
    ],
)
def test_errors_are_reported_in_one_sentence(
    arguments: list[str], message: str, daemon: RunningDaemon, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name=__name__)")
    env = environment(daemon.socket, tmp_path)
    refused(run(without_torch("profile_p2p.py", *arguments), FOLDER, env), message)


def test_a_simulated_gpu_without_measurements_replays_another(tmp_path: Path) -> None:
    """The quickstart's node has V100s."""
    output = tmp_path / "p2p.json"
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as other:
        command = with_torch("profile_p2p.py", *SHORT, "--output", output)
        ran = run(command, FOLDER, environment(other.socket))
    assert ran.returncode == 0, ran.stderr
    assert "no pipeline was measured on a Tesla V100" in ran.stderr
    written = json.loads(output.read_text())
    assert 20 < written["power_w"] < 100
    assert "V100" in written["gpu"]


def test_a_node_without_zeusd_is_reported() -> None:
    command = without_torch("profile_p2p.py", *SHORT)
    refused(run(command, FOLDER, environment("/nowhere")), "no zeusd ")


def test_a_port_that_is_taken_is_reported(daemon: RunningDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = with_torch("profile_p2p.py", *SHORT, "--port", str(port))
        ran = run(command, FOLDER, environment(daemon.socket))
    refused(ran, f"port {port} is taken by another program; omit --port")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports one of the example's programs."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def profile_p2p(program: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`profile_p2p.py` on a node with three real GPUs, or so it believes."""
    module = program("profile_p2p")
    gpu = SimpleNamespace(get_name=lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(module, "get_gpus", lambda: [gpu, gpu, gpu])
    monkeypatch.setattr(module, "node_is_simulated", lambda: False)
    return module


@pytest.mark.parametrize(
    ("backend", "gpus", "torch_sees", "message"),
    [
        ("gloo", [0, 1], 3, "with gloo a real GPU does not wait but idles"),
        ("nccl", [0, 1], 0, "this PyTorch sees no CUDA GPU, and NCCL needs two"),
        ("nccl", [0, 2], 2, "there is no GPU 2: PyTorch sees 2"),
        ("nccl", [0, 2], 3, ""),
    ],
)
def test_real_gpus_need_nccl_and_a_torch_that_sees_them(
    backend: str,
    gpus: list[int],
    torch_sees: int,
    message: str,
    profile_p2p: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: torch_sees > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: torch_sees)
    options = argparse.Namespace(backend=backend, gpus=gpus)
    if message:
        with pytest.raises(profile_p2p.Failed, match=message):
            profile_p2p.check(options)
    else:
        assert profile_p2p.check(options) == "NVIDIA A100-SXM4-80GB"


def test_a_process_that_loses_its_peer_reports_it_and_does_not_hang(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    said = tmp_path / "errors"
    with said.open("wb") as errors:
        job = start_with_torch(
            *("profile_p2p.py", "--backend", "gloo", "--duration", "600"),
            folder=FOLDER,
            env=environment(daemon.socket),
            stderr=errors,
        )
    # They wait for each other: the one has opened its work, and so has the other.
    wait_for(lambda: len(children(job.pid)) == 2, "both processes")
    waits, computes = children(job.pid)
    wait_for(lambda: busy(daemon, 1), "the peer to compute")
    os.kill(computes, signal.SIGKILL)
    assert job.wait(TIMEOUT_S) == 2
    assert said.read_text() == (
        "profile_p2p.py: the process of GPU 1 has ended (killed by signal 9) before anything was "
        "measured; start again\n"
    )
    assert gone(waits)


def busy(daemon: RunningDaemon, gpu: int) -> bool:
    """Whether a GPU draws more than one that waits."""
    with daemon.client() as client:
        uuid = client.node().gpus[gpu].uuid
        return (client.state([uuid])[uuid].power_mw or 0) > 150_000


# ------------------------------------------------------------------------------------- the pipeline


def compare(*arguments: str | Path, gpu: str = "a100") -> list[str]:
    waiting = ("--p2p-power", str(BLOCKING_W[gpu]))
    return with_torch("compare.py", "--num-mbs", "4", "--scale", "1", *waiting, *arguments)


@pytest.fixture(scope="module")
def whole_ticks() -> Iterator[RunningDaemon]:
    """GPUs whose counters see every millisecond; an A100's see a quarter of each tick."""
    with running_daemon("--simulate", "4xa40", gpus=4) as running:
        yield running


def test_a_plan_saves_energy_and_hardly_any_time(
    whole_ticks: RunningDaemon, tmp_path: Path
) -> None:
    daemon = whole_ticks
    output = tmp_path / "figures.json"
    command = compare("--iterations", "4", "--folder", tmp_path / "run", gpu="a40")
    command += ["--output", str(output)]
    ran = run(command, FOLDER, environment(daemon.socket))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads(output.read_text())
    full, planned = figures["full_clocks"], figures["under_the_plan"]

    promised = json.loads((tmp_path / "run" / "plans" / "frontier.json").read_text())
    baseline = {name: promised[f"baseline_{name}"] for name in ("time_s", "energy_j")}
    plan = promised["plans"][-1]
    assert plan["energy_j"] < 0.9 * baseline["energy_j"]
    assert plan["time_s"] < 1.01 * baseline["time_s"]
    # As promised, and what the GPUs take while they wait for this machine's CPU.
    for measured, said in ((full, baseline), (planned, plan)):
        waited_j = 4 * BLOCKING_W["a40"] * (measured["time_s"] - said["time_s"])
        assert measured["energy_j"] - waited_j == pytest.approx(said["energy_j"], rel=0.02)
        assert measured["energy_j"] > 0.99 * said["energy_j"]
        assert measured["time_s"] > said["time_s"]
    assert planned["time_s"] < 1.15 * full["time_s"]

    assert planned["last_loss"] < 0.7 * full["first_loss"]
    assert planned["accuracy"] > 0.5
    assert "as planned" in ran.stdout

    # All GPUs were set, each to several clocks of the profile, and are as they were.
    assert all(len(clocks) >= 2 for clocks in clocks_set(daemon))
    assert locked_mhz(daemon) == [None] * 4
    assert "default clocks" not in ran.stderr  # the client's words for a plan that does not fit


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (0, [], "a pipeline has several stages, each a process: start it with torchrun"),
        (1, [], "a pipeline has several stages, each a process: start it with torchrun"),
        (
            4,
            [],
            "the GPUs are simulated; name the profile that they run with --simulate PROFILE.csv",
        ),
        (4, ["--num-mbs", "3"], "--num-mbs must be at least 4, one for each stage, not 3"),
        (4, ["--profile", "2"], "--profile needs a server that makes the plan"),
    ],
)
def test_missing_requirements_of_training_are_reported(
    ranks: int,
    arguments: list[str],
    message: str,
    daemon: RunningDaemon,
    program: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", ranks)):
        if ranks:
            monkeypatch.setenv(name, str(value))
        else:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["train_pipeline.py", *arguments])
    with pytest.raises(SystemExit):
        program("train_pipeline").main()
    assert capsys.readouterr().err.startswith(f"train_pipeline.py: {message}")


def refused(ran: subprocess.CompletedProcess[str], message: str) -> None:
    """A program has ended with one sentence."""
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    name = Path(ran.args[1]).name
    assert ran.stderr.startswith(f"{name}: {message}"), ran.stderr
    assert ran.stderr.count("\n") == 1
