"""The Python of pages that no other test runs: measuring, metrics, pipelines, and two examples."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import snippets
from tests.snippets import ROOT, Block
from tests.support import RunningDaemon, running_daemon
from tests.zeus.node import VirtualNode
from tests.zeus.pipeline_frequency.heard import Heard
from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

WORKLOAD = "nsdi23/v100/imagenet/resnet50/adadelta/32"

MEASURING = snippets.of(ROOT / "docs/explain/measuring.md")
METRIC = snippets.of(ROOT / "docs/train/metrics.md")
PIPELINE = snippets.of(ROOT / "docs/train/pipeline_frequency_client.md")
BATCH_SIZE = snippets.of(ROOT / "examples/batch_size_optimizer/README.md")
POWER_LIMIT = snippets.of(ROOT / "examples/power_limit_optimizer/README.md")

BLOCKS = [*MEASURING, *METRIC, *PIPELINE, *BATCH_SIZE, *POWER_LIMIT]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualNode]:
    """A V100 in virtual time, which advances only by training, and which `zeus` uses."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    opened = VirtualNode("v100-pcie:setter_ms=0", tmp_path / "state")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "4xa100", gpus=4) as one:
        yield one


def test_the_pages_have_the_expected_number_of_blocks() -> None:
    assert (len(MEASURING), len(METRIC), len(PIPELINE)) == (2, 1, 2)


def test_measuring_a_step(node: VirtualNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeus.monitor.ZeusMonitor", node.monitor)
    work = node.nvml.open_work([0], WORKLOAD)
    space = MEASURING[0].run(train_step=lambda: work.run(10))
    found = space["measurement"]
    assert found.time > 0.5
    assert found.total_energy > 100 * found.time  # the GPU was at work
    assert 0 < found.uncertainty < found.total_energy


class SeenEnough(Exception):
    """Ends an endless stream of samples."""


def test_following_samples(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    with daemon.client() as client:
        uuids = [gpu.uuid for gpu in client.node().gpus]
    seen: list[tuple[Any, ...]] = []

    def note(*values: Any) -> None:
        seen.append(values)
        if len(seen) == 3:
            raise SeenEnough

    with pytest.raises(SeenEnough):
        MEASURING[1].run(print=note)
    assert all(uuid in uuids and power_mw > 0 for uuid, power_mw, _, _ in seen)


def test_pushing_a_metric(node: VirtualNode, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []

    class Gateway(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            pushed.append(f"{self.path}\n{body.decode()}")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    (block,) = METRIC
    monkeypatch.setattr("zeus.metric.ZeusMonitor", lambda gpus, cpus: node.monitor())
    work = node.nvml.open_work([0], WORKLOAD)
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            assert block.source.count("http://gateway:9091") == 1
            source = block.source.replace("http://gateway:9091", address)
            Block(block.path, block.line, source).run(train_step=lambda: work.run(10))
        finally:
            server.shutdown()
    assert "/job/resnet" in pushed[-1]
    assert 'energy_monitor_gpu_energy_joules_count{index="0",window="step"} 1.0' in pushed[-1]


def test_setting_clocks_in_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "zeus.optimizer.pipeline_frequency.optimizer"
    monkeypatch.setattr(f"{module}.PipelineFrequencyOptimizer", Heard)
    space = PIPELINE[0].run(
        dist=SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 4),
        stage=0,
        local_rank=0,
        loader=range(2),
        schedule=["forward"],
        receive=lambda _: None,
        compute=lambda name: Heard.last.events.append(f"compute {name}"),
        send=lambda _: None,
        all_reduce_and_update=lambda: None,
        evaluate=lambda: Heard.last.events.append("evaluate"),
    )
    step = ["step begins", "forward", "compute forward", "step ends"]
    assert space["optimizer"].events == [*step, *step, "pause", "evaluate", "end"]


def test_replaying_an_instruction(daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        info = client.node()
    begin_s = time.monotonic()
    space = PIPELINE[1].run(node=info, uuid=info.gpus[0].uuid)
    space["work"].close()
    assert time.monotonic() - begin_s > 0.05  # as measured at the highest clock


def test_one_run_of_a_job_that_recurs(node: VirtualNode, tmp_path: Path) -> None:
    (block,) = BATCH_SIZE
    work = node.nvml.open_work([0], WORKLOAD)
    asked: list[int] = []

    def split(batch_size: int) -> range:
        asked.append(batch_size)
        return range(5)

    accuracies = iter([0.1, 0.9])
    job = JobSpec(
        job_id="toy-v100",
        job_id_prefix="toy",
        batch_sizes=[64, 128],
        default_batch_size=128,
        target_metric=0.68,
    )
    optimizer = BatchSizeOptimizer(node.monitor(), job=job, store=str(tmp_path / "bso.db"))
    block.run(
        RANK=0,
        sys=sys,
        first=0,
        optimizer=optimizer,
        from_rank_0=lambda value: value,
        shuffled=SimpleNamespace(split=split),
        train_step=lambda batch: work.run(1),
        accuracy=lambda model, *validation: next(accuracies),
        model=None,
        validation=(),
    )
    assert asked == [128, 128]
    assert optimizer.converged


def test_finding_a_limit_in_an_example(node: VirtualNode) -> None:
    (block,) = POWER_LIMIT
    work = node.nvml.open_work([0], WORKLOAD)
    limits: list[float] = []

    def train_step(batch: int) -> None:
        limits.append(node.limit_w())
        work.run(1)

    saved: list[None] = []
    block.run(
        plo=GlobalPowerLimitOptimizer(node.monitor()),
        epochs=4,
        loader=range(60),
        train_step=train_step,
        evaluate=lambda: node.clock.sleep(1),
        save=lambda: saved.append(None),
    )
    assert len(saved) == 4
    assert limits[-1] < 250  # it has chosen
    assert node.limit_w() == 250
