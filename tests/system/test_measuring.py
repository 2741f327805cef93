"""The sampler, look-ups and streams of a running zeusd, over the real nvidia-ml-py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.fake_nvml import fixtures
from tests.fake_nvml.double import ALWAYS, NvmlDouble
from tests.fake_nvml.fixtures import MakeDouble
from tests.support import (
    ALL_MAY,
    TIMEOUT_S,
    RunningDaemon,
    configuration,
    running_daemon,
    script,
    wait_for,
)
from zeus import _node
from zeus.monitor import ZeusMonitor
from zeus_ipc import Client
from zeus_ipc.errors import (
    DaemonUnavailable,
    DeviceFailure,
    NotSupported,
    UnknownGpu,
    ZeusIpcError,
)
from zeus_ipc.limited import BMC, BY_LEASE, REASONS
from zeus_ipc.replies import Sample

nvml_double = fixtures.nvml_double

LOAD_MW = 220_000


@contextlib.contextmanager
def measuring(double: NvmlDouble) -> Iterator[tuple[RunningDaemon, Client]]:
    """A daemon on the double whose sampler has found the sensors' ticks."""
    gpus = int(double.node.count)
    with running_daemon("--nvml-library", double.library, env=double.env, gpus=gpus) as daemon:
        with daemon.client() as client:
            for index in range(gpus):
                settle(client, double.uuid(index))
            yield daemon, client


def settle(client: Client, uuid: str) -> None:
    """Waits until a second has been sampled."""
    begun_ns = time.monotonic_ns()
    wait_for(
        lambda: (found := client.timeline(uuid)) and found[-1][0] > begun_ns + 1_000_000_000,
        "a second of samples",
    )


def energy_j(client: Client, uuid: str, begin_ns: int, end_ns: int) -> tuple[float, float]:
    """Energy of a window, and its uncertainty, J."""
    found = client.windows(uuid, [(begin_ns, end_ns, False)])[uuid]
    energy_uj = found.energy_uj[0]
    assert energy_uj is not None
    return energy_uj / 1e6, found.uncertainty_uj[0] / 1e6


def test_the_time_limited_by_a_known_cap(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"load_mw": LOAD_MW, "counts_limited": 1}])
    uuid = double.uuid(0)
    with measuring(double) as (_, client), _node.use(client):
        begin_ns = time.monotonic_ns()
        wait_for(lambda: time.monotonic_ns() > begin_ns + 1_100_000_000, "a second without a cap")
        capped_ns = time.monotonic_ns()
        double.set_outside(0, 150_000)
        took_ns = time.monotonic_ns() - capped_ns
        monitor = ZeusMonitor(gpu_indices=[0], cpu_indices=[])
        monitor.begin_window("step", sync_execution=False)
        wait_for(lambda: time.monotonic_ns() > capped_ns + 1_100_000_000, "a second under the cap")
        end_ns = time.monotonic_ns()
        windows = [(begin_ns, capped_ns, 0), (begin_ns, end_ns, 0)]
        found = client.windows(uuid, windows, limited=True)[uuid].limited_ms
        assert found.keys() == set(REASONS)
        allowed_ms = (end_ns - begin_ns) / 1e8 + took_ns / 1e6
        assert found["power"] == pytest.approx([0, (end_ns - capped_ns) / 1e6], abs=allowed_ms)
        assert found["heat"] == [0, 0]
        assert client.windows(uuid, windows)[uuid].limited_ms == {}
        measurement = monitor.end_window("step", sync_execution=False)
        limited = measurement.limited
        assert limited is not None
        assert limited[0]["power"] == pytest.approx(measurement.time, rel=0.01)
        assert measurement.limited is limited  # asked for only once
        assert pickle.loads(pickle.dumps(measurement)).limited == limited


def test_a_bmc_that_limits_a_gpu_is_named(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"load_mw": LOAD_MW, "counts_limited": 1}], privilege=ALWAYS)
    uuid = double.uuid(0)
    with measuring(double) as (_, client):

        def seen() -> tuple[int | None, int | None, str | None]:
            state = client.state(uuid)[uuid]
            return state.power_limit_mw, state.enforced_power_limit_mw, state.limit_author

        assert seen() == (250_000, 250_000, None)
        double.misbehave(0, bmc_limit_mw=180_000)
        wait_for(lambda: seen() == (250_000, 180_000, BMC), "the BMC's limit to be seen")
        double.misbehave(0, bmc_limit_mw=0)
        client.set_power_limit(uuid, 150_000)
        wait_for(lambda: seen() == (150_000, 150_000, BY_LEASE), "the lease's limit to be seen")


def test_windows_are_right_and_a_batch_is_answered_whole(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"tick_ms": 100}, {"tick_ms": 20}])
    with measuring(double) as (_, client):
        uuids = [double.uuid(0), double.uuid(1)]
        edges = [time.monotonic_ns()]
        for _ in range(600):
            time.sleep(0.001)
            edges.append(time.monotonic_ns())
        windows = [*itertools.pairwise(edges), (edges[0], edges[-1])]
        found = client.windows(uuids, [(begin, end, False) for begin, end in windows])
        for uuid in uuids:
            energies = [energy_uj or 0 for energy_uj in found[uuid].energy_uj]
            assert len(energies) == len(found[uuid].uncertainty_uj) == 601
            assert sum(energies[:-1]) == energies[-1]
            seconds = (edges[-1] - edges[0]) / 1e9
            assert energies[-1] / 1e6 == pytest.approx(LOAD_MW / 1000 * seconds, rel=0.02)

        def ticks_ns() -> list[int | None]:
            last = client.windows(uuids, [(*edges[-2:], False)])
            return [last[uuid].tick_ns for uuid in uuids]

        right = pytest.approx([100_000_000, 20_000_000], rel=0.02)
        wait_for(lambda: ticks_ns() == right, "the ticks to be known")


def test_a_window_continues_over_a_killed_and_a_restarted_daemon(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"tick_ms": 20}])
    uuid = double.uuid(0)
    with measuring(double) as (daemon, client):
        begin_ns = time.monotonic_ns()
        double.set_load(0, 100_000)
        changed_ns = time.monotonic_ns()  # or as early as begin_ns
        daemon.kill()
        wait_for(lambda: time.monotonic_ns() > changed_ns + 700_000_000, "work while it is dead")
        daemon.start_again()
        daemon.wait_until_serving(1)
        settle(client, uuid)
        end_ns = time.monotonic_ns()
        joules, uncertainty_j = energy_j(client, uuid, begin_ns, end_ns)
        least_j = 100 * (end_ns - begin_ns) / 1e9
        most_j = least_j + 120 * (changed_ns - begin_ns) / 1e9
        assert 0.95 * least_j < joules < 1.05 * most_j
        assert uncertainty_j < joules
        known_ns = max(t_ns for t_ns, *_ in client.timeline(uuid) if t_ns < begin_ns)
        assert uncertainty_j < 0.1 * joules + 250 * (begin_ns - known_ns) / 1e9  # W, at most
        # Earlier samples are also in the history, as the updates that were read.
        assert client.timeline(uuid)[0][0] < begin_ns


def test_another_driver_is_another_history(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"tick_ms": 20}])
    with measuring(double) as (daemon, client):
        daemon.stop()
        for path in daemon.state_dir.glob("history-*"):
            with path.open("r+b") as file:  # as if another load of the driver had written it
                file.write(b"{}")
        before_ns = time.monotonic_ns()
        daemon.start_again()
        daemon.wait_until_serving(1)
        settle(client, double.uuid(0))
        assert client.timeline(double.uuid(0))[0][0] > before_ns
        found = client.windows(double.uuid(0), [(before_ns - 10**9, before_ns, False)])
        assert found[double.uuid(0)].energy_uj == [None]


def test_a_driver_call_that_hangs_delays_no_other_gpu(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"tick_ms": 20}, {"tick_ms": 20}])
    with measuring(double) as (daemon, client):
        double.inject(0, "nvmlDeviceGetFieldValues", delay_ms=60_000, count=1)
        wait_for(lambda: daemon.records("sampler_stuck"), "the sampler to leave its thread behind")
        assert daemon.records("sampler_stuck")[0]["gpu"] == double.uuid(0)
        settle(client, double.uuid(1))
        begin_ns = time.monotonic_ns()
        time.sleep(0.1)
        end_ns = time.monotonic_ns()  # a busy machine sleeps longer
        joules, _ = energy_j(client, double.uuid(1), begin_ns, end_ns)
        assert joules == pytest.approx(LOAD_MW / 1000 * (end_ns - begin_ns) / 1e9, rel=0.2)
        settle(client, double.uuid(1))
        with pytest.raises(NotSupported, match="at the moment"):  # and nothing is invented
            energy_j(client, double.uuid(0), begin_ns, time.monotonic_ns())
        double.clear_faults()
        wait_for(lambda: daemon.records("sampler_unstuck"), "the GPU to be sampled again")
        settle(client, double.uuid(0))


def test_readings_that_fail_now_and_then_cost_nothing(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"tick_ms": 20}])
    uuid = double.uuid(0)
    with measuring(double) as (_, client):
        begin_ns = time.monotonic_ns()
        for code in (3, 999, 10):
            double.inject(0, "nvmlDeviceGetFieldValues", code, count=2)
            double.inject(0, "field.83.0", 3, count=2)
            settle(client, uuid)
        end_ns = time.monotonic_ns()
        joules, _ = energy_j(client, uuid, begin_ns, end_ns)
        assert joules == pytest.approx(LOAD_MW / 1000 * (end_ns - begin_ns) / 1e9, rel=0.02)


def test_a_lost_gpu_is_reported_and_measured_again_when_it_is_back(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"tick_ms": 20}, {"tick_ms": 20}])
    uuid = double.uuid(0)
    with measuring(double) as (_, client):
        begin_ns = time.monotonic_ns()
        double.inject(0, "*", 15)
        end_ns = time.monotonic_ns() + 50_000_000
        wait_for(lambda: time.monotonic_ns() > end_ns, "the window's end")
        with pytest.raises(DeviceFailure) as caught:
            client.windows(uuid, [(begin_ns, end_ns, False)])
        assert caught.value.device_code == 15
        settle(client, double.uuid(1))
        double.clear_faults()
        settle(client, uuid)
        joules, _ = energy_j(client, uuid, begin_ns, end_ns)
        assert joules == pytest.approx(LOAD_MW / 1000 * (end_ns - begin_ns) / 1e9, rel=0.1)


def test_invalid_requests_are_refused_in_one_sentence(nvml_double: MakeDouble) -> None:
    double = nvml_double([{}])
    uuid = double.uuid(0)
    with measuring(double) as (_, client):
        with pytest.raises(ZeusIpcError, match="ends before it begins"):
            client.windows(uuid, [(2, 1, False)])
        with pytest.raises(UnknownGpu, match="GPU-none"):
            client.windows("GPU-none", [(1, 2, False)])
        with pytest.raises(UnknownGpu, match="GPU-none"):
            client.stream("GPU-none")
        with pytest.raises(ValueError, match="volts"):
            client.timeline(uuid, "volts")


# ---------------------------------------------------------------------------------------- programs

PROGRAM = """
import math, os, sys, time
from zeus.monitor import ZeusMonitor
monitor = ZeusMonitor(cpu_indices=[], log_file=sys.argv[1])
for key in ("first", "second"):
    with monitor.window(key):
        time.sleep(0.3)
print("measured", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.readline()
elif sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        with monitor.window("in the child") as window:
            time.sleep(0.2)
        end = time.monotonic() + 20
        while math.isnan(window.total_energy) and time.monotonic() < end:  # zeusd is slow now
            time.sleep(0.1)
        watts = window.total_energy / window.time
        os._exit(0 if 200 < watts < 240 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_program_that_reads_each_energy_at_once_knows_all(nvml_double: MakeDouble) -> None:
    """Each waits for the sensor's next tick, which is no delay of zeusd's. A slow one would be."""
    with measuring(nvml_double([{"tick_ms": 100}])) as (_, client), _node.use(client):
        monitor = ZeusMonitor(gpu_indices=[0], cpu_indices=[])
        slow = False
        for _ in range(8):
            with monitor.window("step") as window:
                time.sleep(0.02)
            asked = time.monotonic()
            known = not math.isnan(window.total_energy)
            slow = slow or time.monotonic() - asked > 0.2
            assert known or slow


@pytest.mark.parametrize("then", ["exit", "wait", "fork"])
def test_the_log_is_written_behind_and_when_the_program_ends(
    nvml_double: MakeDouble, tmp_path: Path, then: str
) -> None:
    double = nvml_double([{"tick_ms": 20}])
    path = tmp_path / "log.csv"
    with measuring(double) as (daemon, client):
        env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket}
        program = script(PROGRAM, str(path), then, env=env)
        assert program.stdout.readline() == "measured\n"
        if then == "wait":
            wait_for(lambda: len(path.read_text().splitlines()) == 3, "the log to be written")
            program.stdin.write("\n")
            program.stdin.flush()
        assert program.wait(TIMEOUT_S) == 0
        rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
        assert [row[1] for row in rows] == ["first", "second"]
        booted_s = time.time() - time.monotonic()
        for began, _, took, energy in rows:
            begin_ns = round((float(began) - booted_s) * 1e9)
            window = begin_ns, begin_ns + round(float(took) * 1e9)
            known_j, uncertainty_j = energy_j(client, double.uuid(0), *window)
            assert float(energy) == pytest.approx(known_j, rel=0.01)
            # A busy machine delays readings, and zeusd says by how much that may mislead.
            within_j = max(0.03 * known_j, 2 * uncertainty_j)
            assert known_j == pytest.approx(220 * float(took), abs=within_j)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_commands_print_what_they_measured_when_they_are_ended(
    nvml_double: MakeDouble, number: signal.Signals
) -> None:
    double = nvml_double([{"tick_ms": 20}, {"tick_ms": 20}])
    with measuring(double) as (daemon, _):
        env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "zeus.monitor"]
        energy, power = (
            subprocess.Popen(
                [*command, *more],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for more in (
                ["energy", "--gpu-indices", "0", "1"],
                ["power", "--gpu-indices", "1", "--update-period", "0.2"],
            )
        )
        assert energy.stderr.readline().startswith("measuring GPUs [0, 1]")
        lines = [power.stdout.readline() for _ in range(5)]
        assert all("{'GPU1': 220.0" in line for line in lines)
        for process in (power, energy):
            process.send_signal(number)
        out, _ = power.communicate(timeout=TIMEOUT_S)
        seconds = float(out.partition("Total time (s): ")[2].splitlines()[0])
        joules = float(out.partition("GPU1: ")[2].splitlines()[0])
        assert joules / seconds == pytest.approx(220, rel=0.02)
        shown, complaint = energy.communicate(timeout=TIMEOUT_S)
        assert complaint == ""
        assert "Measurement(" in shown
        assert "gpu_energy={0:" in shown.replace("\n", "")
        assert (power.returncode, energy.returncode) == (0, 0)


def test_the_commands_report_a_missing_gpu_and_a_reader_that_has_enough(
    nvml_double: MakeDouble,
) -> None:
    double = nvml_double([{"tick_ms": 20}, {"tick_ms": 20}])
    with measuring(double) as (daemon, _):
        env = {**os.environ, "ZEUSD_SOCK_PATH": daemon.socket, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "zeus.monitor"]
        wrong = subprocess.run(
            [*command, "energy", "--gpu-indices", "7"], env=env, capture_output=True, text=True
        )
        assert wrong.returncode == 1
        assert wrong.stderr.startswith("zeus.monitor: There is no GPU 7")
        assert len(wrong.stderr.splitlines()) == 1
        cut = [*command, "power", "--update-period", "0.1"]
        reader = ["sh", "-c", '"$@" | head -1', "sh", *cut]
        read = subprocess.run(reader, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert ("GPU0" in read.stdout, read.stderr) == (True, "")


# ---------------------------------------------------------------------------------------- streams


def take(stream: Iterator[Sample], count: int) -> list[Sample]:
    return [next(stream) for _ in range(count)]


def test_a_stream_has_every_tick_of_its_gpus_and_of_no_other(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"tick_ms": 20}, {"tick_ms": 20}, {"tick_ms": 20}])
    wanted = [double.uuid(0), double.uuid(2)]
    with measuring(double) as (_, client):
        with client.stream(wanted) as stream:
            samples = take(stream, 100)
        assert {sample.gpu for sample in samples} == set(wanted)
        mine = [sample for sample in samples if sample.gpu == wanted[0]]
        assert [sample.number for sample in mine] == list(
            range(mine[0].number, mine[0].number + len(mine))
        )
        assert all(sample.lost == 0 for sample in samples)
        first, last = mine[0], mine[-1]
        joules = (last.energy_uj - first.energy_uj) / 1e6
        assert joules == pytest.approx(220 * (last.t_ns - first.t_ns) / 1e9, rel=0.05)
        assert last.power_mw == pytest.approx(LOAD_MW, rel=0.01)
        assert last.gpu_clock_mhz is not None
        assert last.temperature_c is not None
        assert last.throttle_reasons is not None


def test_a_slow_subscriber_loses_samples_and_learns_how_many(nvml_double: MakeDouble) -> None:
    double = nvml_double([{"tick_ms": 20}] * 8)
    uuids = [double.uuid(index) for index in range(8)]
    with measuring(double) as (_, client):
        with client.stream(uuids) as quick, client.stream(uuids, buffer=5) as slow:
            first = {}
            while len(first) < 8:
                sample = next(slow)
                first.setdefault(sample.gpu, sample.number)
            everything = take(quick, 2000)
            assert all(sample.lost == 0 for sample in everything)
            newest = max(sample.number for sample in everything if sample.gpu == uuids[0])
            late = [next(slow)]
            while late[-1].number <= newest or late[-1].gpu != uuids[0]:
                late.append(next(slow))
            mine = [sample for sample in late if sample.gpu == uuids[0]]
            assert sum(sample.lost for sample in mine) > 20
            assert slow.lost == sum(sample.lost for sample in late)
            assert len(mine) + sum(sample.lost for sample in mine) <= mine[-1].number
            assert mine[-1].number - first[uuids[0]] >= newest - first[uuids[0]]


def test_a_stream_can_be_read_asynchronously_and_closed_from_elsewhere(
    nvml_double: MakeDouble,
) -> None:
    double = nvml_double([{"tick_ms": 20}, {"tick_ms": 20}])

    async def read(client: Client) -> tuple[int, int]:
        streams = [client.stream(double.uuid(index)) for index in (0, 1)]
        counts = [0, 0]

        async def follow(index: int) -> None:
            async for sample in streams[index]:
                assert sample.gpu == double.uuid(index)
                counts[index] += 1

        tasks = [asyncio.create_task(follow(index)) for index in (0, 1)]
        while min(counts) < 20:
            await asyncio.sleep(0.01)
        for stream in streams:
            stream.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        return counts[0], counts[1]

    with measuring(double) as (_, client):
        assert min(asyncio.run(read(client))) >= 20


def test_a_stream_survives_a_restart_and_ends_with_the_daemon(
    nvml_double: MakeDouble,
) -> None:
    double = nvml_double([{"tick_ms": 20}])
    uuid = double.uuid(0)
    with measuring(double) as (daemon, client):
        stream = client.stream(uuid)
        before = take(stream, 10)[-1]
        daemon.process.send_signal(signal.SIGUSR1)
        daemon.process.wait(TIMEOUT_S)
        daemon.start_again()
        daemon.wait_until_serving(1)
        assert next(stream).number > before.number
        daemon.stop()
        with pytest.raises(DaemonUnavailable):
            take(stream, 10_000)
        stream.close()


def test_nothing_is_published_that_nobody_wants_and_nonsense_is_ignored(
    nvml_double: MakeDouble,
) -> None:
    double = nvml_double([{"tick_ms": 20}])
    with measuring(double) as (daemon, client):
        path = client.node().stream
        assert path is not None
        with zmq.Context() as context, context.socket(zmq.SUB) as everything:
            everything.setsockopt(zmq.LINGER, 0)
            everything.setsockopt(zmq.SUBSCRIBE, b"")  # a prefix of every topic
            everything.setsockopt(zmq.SUBSCRIBE, b"\xff" * 90)
            for number in range(200):
                everything.setsockopt(zmq.SUBSCRIBE, f"nonsense-{number}".encode())
            everything.connect(f"ipc://{path}")
            with client.stream(double.uuid(0)) as stream:
                take(stream, 30)
            assert not everything.poll(0)
        assert daemon.records("protocol_error") == []


def test_one_user_has_a_bounded_number_of_connections_streams_included(
    nvml_double: MakeDouble,
) -> None:
    double = nvml_double([{"tick_ms": 20}])
    with contextlib.ExitStack() as stack:
        make = running_daemon("--nvml-library", double.library, env=double.env, gpus=1)
        daemon = stack.enter_context(make)
        daemon.stop()
        text = f"{ALL_MAY}\n[server]\nmax_connections_per_user = 4\n"
        options = configuration(daemon.directory, text)
        with running_daemon(
            "--nvml-library",
            double.library,
            *options,
            env=double.env,
            gpus=1,
            directory=daemon.directory,
        ) as bounded:
            client = stack.enter_context(bounded.client())
            settle(client, double.uuid(0))
            streams = [client.stream(double.uuid(0)) for _ in range(8)]
            wait_for(lambda: bounded.records("connection_refused"), "the bound to be enforced")
            heard = sum(stream.receive(1.0) is not None for stream in streams)
            assert 1 <= heard <= 3
            for stream in streams:
                stream.close()
