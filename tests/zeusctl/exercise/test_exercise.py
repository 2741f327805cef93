"""`zeusctl exercise` on simulated nodes, and through zeusd on the C stand-in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml.double import ALWAYS, BY_EUID, NvmlDouble
from tests.support import RunningDaemon, public_directory, running_daemon, wait_for
from tests.zeusctl.conftest import Ctl, spawn
from tests.zeusctl.probe.stand_in import NotedLoad
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeus_ipc.controls import Control
from zeusctl.cli import main
from zeusctl.exercise import outside
from zeusctl.exercise.gpu import _all_taken, clock_ranges, power_limits, rounding
from zeusctl.exercise.report import SetTrial, ValueRounding
from zeusctl.exits import Exit
from zeusctl.probe.load import BURST_S, kept_up

PAGE = Path(__file__).with_name("page.txt")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _exercised(ctl: Ctl, *arguments: str, code: int = Exit.OK) -> dict[str, Any]:
    said = ctl("exercise", *arguments, "--yes", "--json")
    assert said.code == code, said.err
    report: dict[str, Any] = json.loads(Path("zeus-exercise.json").read_text())
    assert json.loads(said.out) == report
    return report


# -------------------------------------------------------------------------------------- the values


def _taken(pairs: list[tuple[int, int]]) -> ValueRounding | None:
    return rounding([SetTrial("power_limit", [a], [b], 1.0) for a, b in pairs])


@pytest.mark.parametrize("step", [1, 125, 500, 1000])
@pytest.mark.parametrize("toward", ["down", "up", "nearest"])
def test_rounding_is_found_exactly(step: int, toward: str) -> None:
    add = {"down": 0, "up": step - 1, "nearest": step // 2}[toward]
    asked = power_limits(100_000, 250_000)
    found = _taken([(mw, (mw + add) // step * step) for mw in asked])
    assert found == ValueRounding(step, "exact" if step == 1 else toward)


def test_values_stay_within_the_range() -> None:
    narrow = power_limits(60_000, 61_000)
    assert narrow[:2] == [60_000, 61_000]
    assert all(60_000 <= mw <= 61_000 for mw in narrow)
    assert clock_ranges([877]) == [[877, 877]]


def test_a_control_that_the_driver_does_not_offer_after_all_fails_nothing() -> None:
    def trial(error: str | None) -> SetTrial:
        applied = None if error else [2619, 2619]
        return SetTrial("memory_clocks", [2619, 2619], applied, 1.0, error)

    checks = [
        _all_taken(Control.MEMORY_CLOCKS, [trial(one) for one in errors])
        for errors in (("not_supported",), ("not_supported", "no_permission"), (None, None))
    ]
    assert [one.ok for one in checks] == [True, False, True]
    assert "not offered" in checks[0].what


def test_a_load_is_kept_up_and_has_ended_afterwards() -> None:
    noted = NotedLoad()
    with kept_up(noted):
        wait_for(lambda: len(noted.asked) > 2, "a third burst")
    assert noted.asked[0] == 2 * BURST_S
    assert set(noted.asked[1:-2]) == {BURST_S}
    assert noted.asked[-2:] == ["waited", "closed"]


# ---------------------------------------------------------------------------------- simulated nodes


def test_all_of_a_gpu_is_as_it_was(ctl: Ctl, daemon: RunningDaemon) -> None:
    (gpu,) = _exercised(ctl, "2")["gpus"]
    limits = [trial for trial in gpu["trials"] if trial["control"] == "power_limit"]
    assert {100_000, 400_000} <= {trial["asked"][0] for trial in limits}
    assert gpu["found"] == gpu["left"]
    with daemon.client() as client:
        assert client.leases() == []


def test_a_driver_that_rounds_is_detected(ctl: Ctl, node: SimulatedNode) -> None:
    node.misbehave(0, round_to_mw=500)
    (gpu,) = _exercised(ctl, "0")["gpus"]
    assert gpu["power_limit_rounding"] == {"step": 500, "toward": "down"}


def test_a_driver_that_ignores_a_limit_fails_a_check(ctl: Ctl, node: SimulatedNode) -> None:
    node.misbehave(3, ignored_sets=1)
    report = _exercised(ctl, "3", code=Exit.FAILED)
    (failed,) = [check for check in report["gpus"][0]["checks"] if not check["ok"]]
    assert failed["what"] == "every value of power_limit within its range is accepted"
    assert failed["text"] == "125 W: unchanged"


def test_a_gpu_that_someone_computes_on_is_refused(
    ctl: Ctl, daemon: RunningDaemon, node: SimulatedNode
) -> None:
    with daemon.client() as client:
        info = client.node()
        uuid = info.gpus[0].uuid
        assert info.simulated is not None
        work = SimulatedWork(info.simulated, [uuid], "model/compute")
        wait_for(lambda: client.processes(uuid)[uuid].processes, "the process to be listed")
        said = ctl("exercise", "0", "--yes")
        work.close()
        wait_for(lambda: not client.processes(uuid)[uuid].processes, "the process to be gone")
    assert said.code == Exit.HELD
    assert "computes on GPU 0" in said.err


def test_a_gpu_that_someone_holds_is_refused(ctl: Ctl, daemon: RunningDaemon) -> None:
    with spawn(daemon, "set", "1", "-p", "200") as holder, daemon.client() as client:
        wait_for(client.leases, "the lease")
        said = ctl("exercise", "1", "--yes")
        assert said.code == Exit.HELD
        assert f"is held by process {holder.pid}" in said.err


def test_a_gpu_that_would_not_be_restored_to_what_it_holds_is_refused(
    ctl: Ctl, daemon: RunningDaemon, node: SimulatedNode
) -> None:
    node.set_outside(1, 180_000)
    said = ctl("exercise", "1", "--yes")
    assert "GPU 1 holds power_limit 180 W, and zeusd would restore 250 W" in said.err
    assert "run `zeusctl reset 1` first" in said.err
    with daemon.client() as client:
        assert client.leases() == []
    node.set_outside(1, 250_000)


def test_without_a_terminal_there_is_no_prompt(ctl: Ctl) -> None:
    said = ctl("exercise", "0")
    assert said.code == Exit.USAGE
    assert "standard input is no terminal to confirm it at; add --yes" in said.err


def test_an_exercise_that_is_killed_in_the_middle_leaves_all_as_it_was(
    ctl: Ctl, daemon: RunningDaemon, node: SimulatedNode
) -> None:
    node.inject(0, "set_power_limit", latency_s=0.2)  # there is a middle, however busy the machine
    with daemon.client() as client:
        uuid = client.node().gpus[0].uuid

        def limit() -> int | None:
            return client.state(uuid)[uuid].power_limit_mw

        before = limit()
        with spawn(daemon, "exercise", "0", "--yes") as process:
            wait_for(lambda: limit() != before, "a limit to be tried")
            process.kill()
            process.wait()
        wait_for(lambda: not client.leases() and limit() == before, "everything to be restored")


# ------------------------------------------------------------------------------------- the stand-in


def test_values_outside_a_range_are_its_neighbours_and_pairs_the_wrong_way_round() -> None:
    limits = [[100_000], [250_000], [175_000]]
    assert list(outside.values(Control.POWER_LIMIT, limits)) == [[99_000], [251_000], [0]]
    assert list(outside.values(Control.MEMORY_CLOCKS, [[877, 877]])) == [[1, 1], [1754, 1754]]
    assert list(outside.values(Control.POWER_PROFILE, [[1], [1, 7], []])) == []
    assert [1380, 135] in outside.values(Control.GPU_CLOCKS, [[1380, 1380], [135, 135]])


def test_the_page_names_every_value_check_and_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_daemon("--simulate", "1xb200", gpus=1) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        with pytest.raises(SystemExit) as ended:
            main(["exercise", "0", "--yes"])
    said = capfd.readouterr()
    assert ended.value.code == Exit.OK
    assert (
        re.sub(r"\b\d+( m?s\b)|\d{4}-\S+(?=,)", r"N\1", said.out).replace("N,", "NOW,")
        == PAGE.read_text()
    )
    assert said.err.splitlines() == [
        "GPU 0: 5 controls through the range",
        "GPU 0: SIGKILL to a process that holds the power limit",
    ]


@pytest.fixture
def site() -> Iterator[tuple[RunningDaemon, NvmlDouble]]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        privilege = BY_EUID if os.getuid() == 0 else ALWAYS
        double = NvmlDouble(directory, [{}], privilege=privilege)
        double.misbehave(0, round_mw=1000)
        arguments = ("--nvml-library", double.library)
        daemon = stack.enter_context(
            running_daemon(*arguments, gpus=1, env=double.env, directory=directory)
        )
        yield daemon, double


def test_zeusd_is_killed_and_the_stand_in_is_unchanged(
    site: tuple[RunningDaemon, NvmlDouble],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon, double = site
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    monkeypatch.setitem(sys.modules, "torch", None)  # it takes seconds, and sees no stand-in
    for name, value in double.env.items():
        monkeypatch.setenv(name, value)
    pid = daemon.process.pid

    def restart() -> None:
        daemon.process.wait()
        daemon.start_again()

    manager = threading.Thread(target=restart)
    manager.start()
    with pytest.raises(SystemExit) as ended:
        kill = ("--kill-zeusd", "--zeusd-pid", str(pid))
        main(["exercise", "0", "--yes", *kill, "--library", double.library])
    manager.join()
    page = capfd.readouterr().out
    assert ended.value.code == Exit.OK, page
    assert "rounded down to 1000 mW" in page
    assert "a killed zeusd returns, and live holders keep their leases" in page
    assert daemon.process.pid != pid
    if os.getuid() == 0:
        assert "nvmlDeviceSetPersistenceMode, 2: invalid argument (2), holds" in page
    assert double.limit_mw(0) == 250_000
    assert double.node.gpus[0].lock_max == 0

    report = json.loads(Path("zeus-exercise.json").read_text())
    if os.getuid() != 0:
        assert "needs root" in report["driver_not_asked"]
        return
    answers = report["gpus"][0]["outside"]
    assert report["driver_not_asked"] is None
    told = {(one["control"], *one["asked"]): (one["code"], one["holds"]) for one in answers}
    assert {key: code for key, (code, _) in told.items()} == {
        **{("power_limit", mw): 2 for mw in (99_000, 251_000, 0)},
        ("gpu_clocks", 1, 1): 0,
        ("gpu_clocks", 2760, 2760): 0,
        ("gpu_clocks", 1380, 135): 2,
        ("persistence_mode", 2): 2,
    }
    assert told["power_limit", 251_000] == (2, [100_000])
    asked = {(call.symbol, call.arguments) for call in double.calls() if call.pid == os.getpid()}
    assert ("nvmlDeviceSetPowerManagementLimit", (251_000, 0)) in asked
