"""Simulated GPUs that run the instructions of a pipeline."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from tests.zeusd.devices.opening import simulated
from zeus_common.tables import records
from zeusd.devices.simulated.models import DEVICES

DATA = files("zeusd.devices.simulated") / "data" / "perseus"
SHORT = (
    "stage,instruction,frequency,time,energy\n"
    "2,forward,1410,0.01,3\n2,forward,1200,0.011,2.5\n2,backward,1410,0.02,6.5\n"
)


def rows(gpu: str) -> list[tuple[int, str, int, float, float]]:
    return [
        (
            int(row["stage"]),
            row["instruction"],
            int(row["frequency"]),
            float(row["time"]),
            float(row["energy"]),
        )
        for row in records(DATA / f"gpt3-175b+{gpu}.columns.csv.xz")
    ]


@pytest.mark.parametrize(("gpu", "stages"), [("a100", (0, 3, 7)), ("a40", (1, 6))])
def test_each_row_of_the_measured_tables_is_replayed(gpu: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        nvml, clock = simulated(f"{gpu}:setter_ms=0")
        work = nvml.open_work([0], f"perseus/{gpu}/gpt3-175b/stage{stage}")
        measured = [row for row in rows(gpu) if row[0] == stage]
        assert len(measured) >= 70
        for _, instruction, mhz, seconds, joules in measured:
            nvml.set_gpu_clocks(0, mhz, mhz)
            work.run(5, instruction)  # lets the new clock settle
            begin_ns, before_j = clock(), nvml.true_energy_j(0)
            work.run(10, instruction)
            assert (clock() - begin_ns) / 1e10 == pytest.approx(seconds, rel=1e-4)
            assert (nvml.true_energy_j(0) - before_j) / 10 == pytest.approx(joules, rel=1e-4)
            assert nvml.gpu_clock_mhz(0) == mhz
        work.close()


@pytest.mark.parametrize("gpu", ["a100-sxm-80", "a40"])
def test_the_tables_clocks_are_the_devices(gpu: str) -> None:
    clocks = {row[2] for row in rows(gpu.partition("-")[0])}
    assert clocks <= set(DEVICES[gpu].clocks_mhz)


def test_a_waiting_gpu_draws_the_blocking_power_and_closed_work_none() -> None:
    nvml, clock = simulated("a100:setter_ms=0")
    idle_w = DEVICES["a100-sxm-80"].idle_w[0]
    work = nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")

    def power_w() -> float:
        before_j = nvml.true_energy_j(0)
        clock.sleep(1.0)
        return nvml.true_energy_j(0) - before_j

    assert power_w() == pytest.approx(83.64)
    assert nvml.throttle_reasons(0) == 0
    work.run(3, "forward")
    nvml.set_gpu_clocks(0, 900, 900)
    assert power_w() == pytest.approx(83.64)
    assert nvml.gpu_clock_mhz(0) == 900
    work.close()
    assert power_w() == pytest.approx(idle_w)
    assert nvml.throttle_reasons(0) == 1


def test_queued_instructions_run_one_after_another_each_at_its_own_pace() -> None:
    nvml, clock = simulated("a100:setter_ms=0")
    work = nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")
    table = {
        (instruction, mhz): (seconds, joules)
        for stage, instruction, mhz, seconds, joules in rows("a100")
        if stage == 0
    }
    begin_ns, before_j = clock(), nvml.true_energy_j(0)
    for _ in range(3):
        work.launch(1, "forward")
        work.launch(2, "backward")
    forward, backward = table["forward", 1410], table["backward", 1410]
    done, ends_ns = work.progress()
    assert done == 0
    assert (ends_ns - begin_ns) / 1e9 == pytest.approx(3 * forward[0] + 6 * backward[0], rel=1e-6)
    work.wait()
    assert work.progress()[0] == 9
    assert clock() == pytest.approx(ends_ns, abs=1000)
    expected_j = 3 * forward[1] + 6 * backward[1]
    assert nvml.true_energy_j(0) - before_j == pytest.approx(expected_j, rel=1e-5)


def test_a_change_in_the_middle_takes_effect_in_the_middle() -> None:
    """Half an instruction at one clock and half at another takes the mean of both."""
    nvml, clock = simulated("a100:setter_ms=0")
    work = nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")
    table = {row[2]: row[3] for row in rows("a100") if row[:2] == (0, "backward")}
    begin_ns = clock()
    work.launch(100, "backward")
    clock.sleep(50 * table[1410])
    nvml.set_gpu_clocks(0, 900, 900)
    work.wait()
    took_s = (clock() - begin_ns) / 1e9
    assert took_s == pytest.approx(50 * table[1410] + 50 * table[900], abs=0.02)


def test_a_clock_on_its_way_continues_in_the_next_instruction() -> None:
    """Many short instructions after a change take as long as one long instruction."""
    lengths = []
    for parts in (1, 40):
        nvml, clock = simulated("a100:setter_ms=0")
        work = nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")
        work.launch(1, "forward")
        clock.sleep(0.02)
        nvml.set_gpu_clocks(0, 855, 855)
        begin_ns = clock()
        work.wait()
        for part in range(parts):  # alternating: equal ones would be one stretch of work
            work.launch(0.5 / parts, "forward" if part % 2 else "backward")
        work.launch(0.5, "backward")
        work.wait()
        lengths.append((clock() - begin_ns) / 1e9)
    nvml, clock = simulated("a100:setter_ms=0")
    assert lengths[0] == pytest.approx(0.5 * 0.1 + 0.12, abs=0.1)
    assert lengths[1] < lengths[0] + 0.05


def test_between_the_rows_clocks_are_interpolated_and_below_them_all_takes_longer() -> None:
    nvml, clock = simulated("a100:setter_ms=0")
    work = nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")

    def run(mhz: int) -> tuple[float, float]:
        nvml.set_gpu_clocks(0, mhz, mhz)
        work.run(5, "forward")
        begin_ns, before_j = clock(), nvml.true_energy_j(0)
        work.run(10, "forward")
        seconds = (clock() - begin_ns) / 1e9
        return seconds / 10, (nvml.true_energy_j(0) - before_j) / seconds

    (lowest_s, lowest_w), (half_s, half_w) = run(855), run(420)
    assert half_s == pytest.approx(lowest_s * 855 / 420, rel=1e-3)
    assert 55 < half_w < lowest_w
    last_w = half_w
    for mhz in (300, 210):
        _, watts = run(mhz)
        assert watts < last_w
        last_w = watts


def test_a_low_power_limit_slows_instructions_and_caps_their_power() -> None:
    nvml, clock = simulated("a100:setter_ms=0")
    work = nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")
    work.run(5, "forward")
    begin_ns = clock()
    work.run(10, "forward")
    free_s = (clock() - begin_ns) / 1e10
    assert nvml.throttle_reasons(0) & 4 == 0
    nvml.set_power_limit(0, 200_000)
    work.run(10, "forward")
    begin_ns, before_j = clock(), nvml.true_energy_j(0)
    work.run(10, "forward")
    capped_s = (clock() - begin_ns) / 1e10
    assert capped_s > 1.1 * free_s
    assert (nvml.true_energy_j(0) - before_j) / (10 * capped_s) <= 200 * 474.6 / 400 + 0.1
    work.launch(1, "forward")
    assert nvml.throttle_reasons(0) & 4


def test_instructions_that_cannot_run_are_refused(tmp_path: Path) -> None:
    nvml, _ = simulated("a100:setter_ms=0,v100")
    for name in ("stage8", "stage-1", "stagex", "stage", ""):
        with pytest.raises(ValueError, match="there are perseus/a100"):
            nvml.open_work([0], f"perseus/a100/gpt3-175b/{name}")
    with pytest.raises(ValueError, match="measured on a40"):
        nvml.open_work([0], "perseus/a40/gpt3-175b/stage0")
    work = nvml.open_work([0], "perseus/a100/gpt3-175b/stage0")
    for instruction in (None, "load"):
        with pytest.raises(ValueError, match="launch one of forward, backward"):
            work.launch(1, instruction)
    plain = nvml.open_work([1], "model/compute")
    with pytest.raises(ValueError, match="not made of instructions"):
        plain.launch(1, "forward")


# -------------------------------------------------------------------------- a profile of one's own


def test_a_custom_profile_runs_in_process(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(SHORT)
    nvml, clock = simulated("a100:setter_ms=0")
    work = nvml.open_work([0], f"profile:{path}#stage=2&blocking_w=90")
    begin_ns = clock()
    work.run(3, "forward")
    work.run(1, "backward")
    assert (clock() - begin_ns) / 1e9 == pytest.approx(0.05)
    before_j = nvml.true_energy_j(0)
    clock.sleep(1)
    assert nvml.true_energy_j(0) - before_j == pytest.approx(90)


@pytest.mark.parametrize(
    ("text", "fragment", "said"),
    [
        (SHORT, "stage=3", "no stage 3"),
        (SHORT, "step=3", "names no stage"),
        (SHORT, "stage=2&blocking_w=x", "names no stage"),
        (SHORT, "stage=2&blocking=80", "names no stage"),
        ("", "stage=0", "columns stage, instruction, .* are missing"),
        ("a,b\n1,2\n", "stage=0", "columns stage, instruction, .* are missing"),
        (SHORT.replace("0.01,", "-1,"), "stage=2", "time is '-1'; it must be a number above 0"),
        (SHORT.replace("0.01,", "nan,"), "stage=2", "time is 'nan'"),
        (SHORT.replace("1410,0.01,3", "1410"), "stage=2", "it has 3 fields, the header has 5"),
    ],
)
def test_an_invalid_profile_is_reported(
    tmp_path: Path, text: str, fragment: str, said: str
) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    nvml, _ = simulated("a100:setter_ms=0")
    with pytest.raises(ValueError, match=said):
        nvml.open_work([0], f"profile:{path}#{fragment}")
