"""Figures in the real loggers, whatever else a job logs to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.late import late
from tests.support import wait_for
from tests.zeus.node import VirtualNode
from zeus.measure import EnergyCallback

tensorboard = late("torch.utils.tensorboard")
accumulators = late("tensorboard.backend.event_processing.event_accumulator")

STEPS = 40
TOTALS = {"energy/total_kWh", "energy/mean_W"}

Row = dict[str, Any]


def rows_of(run_dir: str) -> list[Row]:
    """The history of a run that was made offline: records in blocks of 32 KiB, as LevelDB's."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = Path(run_dir).parent.glob("*.wandb")
    rows: list[Row] = []

    def ended() -> bool:
        rows.clear()
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            if at + 7 + length > len(data):
                break  # it is being written
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind not in (1, 4):  # whole, or the last part
                continue
            record, whole = Record.FromString(whole), b""
            if record.HasField("exit"):
                return True
            if record.HasField("history"):
                items = record.history.item
                named = {one.key or "/".join(one.nested_key): one.value_json for one in items}
                rows.append({name: json.loads(value) for name, value in named.items()})
        return False

    wait_for(ended, "the run to be written")
    return rows


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    needs.package("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    import wandb

    yield wandb
    wandb.teardown()


def train(node: VirtualNode, log: Any, job: Callable[[int], object], first: int = 0) -> None:
    """A training whose job logs its own at each step, from a first one on."""
    callback = EnergyCallback(node.monitor(), log=log, log_every=4, print_summary=False)
    with callback:
        for step, _ in enumerate(callback.steps(range(STEPS)), first):
            node.clock.sleep(0.5)
            job(step)


def by_step(run: Any, step: int) -> None:
    run.log({"loss": step})


def by_steps_of_its_own(run: Any, step: int) -> None:
    run.log({"loss": step}, step=1000 * step)
    run.log({"accuracy": step}, step=1000 * step)


def by_epoch(run: Any, step: int) -> None:
    if step % 10 == 9:
        run.log({"loss": step}, step=step // 10)


def not_at_all(run: Any, step: int) -> None:
    pass


Job = Callable[[Any, int], None]


@pytest.mark.parametrize("job", [by_step, by_steps_of_its_own, by_epoch, not_at_all])
def test_all_figures_arrive_in_weights_and_biases_beside_the_rows_of_the_job(
    node: VirtualNode, wandb: Any, job: Job
) -> None:
    found: list[list[Row]] = []
    for logs in (False, True):
        run = wandb.init(project="zeus")
        for first, log in ((0, run), (STEPS, wandb)):
            train(node, log if logs else None, lambda step: job(run, step), first)
        run.finish()
        found.append(rows_of(run.dir))
    without, own = (
        [(row["_step"], row["loss"], row.get("accuracy")) for row in rows if "loss" in row]
        for rows in found
    )
    assert own == without
    assert len(own) == {by_epoch: 8, not_at_all: 0}.get(job, 2 * STEPS)
    mine = [row for row in found[1] if "energy/steps" in row]
    axis = [row["energy/steps"] for row in mine]
    assert axis == sorted(axis)
    assert axis[-1] == 2 * STEPS, "the second training goes on"
    steps = [row for row in mine if "energy/step_J" in row]
    assert len(steps) >= (6 if job is by_epoch else 2 * STEPS // 4 - 2)
    totals = [row["energy/steps"] for row in mine if row.keys() >= TOTALS]
    assert STEPS <= totals[0] <= (STEPS + 8 if job is by_epoch else STEPS)
    assert totals[1:] == [2 * STEPS]


def test_two_trainings_follow_each_other_in_tensorboard(node: VirtualNode, tmp_path: Path) -> None:
    writer = tensorboard.SummaryWriter(str(tmp_path))
    for _ in range(2):
        train(node, writer, lambda step: writer.add_scalar("loss", step, 1000 * step))
    writer.close()
    events = accumulators.EventAccumulator(str(tmp_path)).Reload()
    steps = [one.step for one in events.Scalars("energy/step_J")]
    assert steps[0] <= 8
    assert steps == sorted(steps)
    assert len(steps) >= 2 * STEPS // 4 - 2
    for name in TOTALS:
        assert [one.step for one in events.Scalars(name)] == [STEPS, 2 * STEPS]


def test_all_figures_arrive_in_mlflow(
    node: VirtualNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs.package("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        for _ in range(2):
            train(node, mlflow, lambda step: mlflow.log_metric("loss", step, step=1000 * step))
    client = mlflow.MlflowClient()
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "energy/step_J")]
    assert len(set(steps)) >= 2 * STEPS // 4 - 2
    for name in TOTALS:
        found = client.get_metric_history(run.info.run_id, name)
        assert sorted(one.step for one in found) == [STEPS, 2 * STEPS]
