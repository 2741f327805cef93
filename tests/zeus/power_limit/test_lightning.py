"""A real Lightning trainer trains a tiny model while a simulated GPU works, in virtual time."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import snippets
from tests.examples.programs import with_torch
from tests.late import late
from tests.zeus.in_trainers import LIMITS, SMALL, STEPS, assert_given_back, assert_right
from tests.zeus.node import VirtualNode
from zeus.optimizer import power_limit
from zeus.optimizer.power_limit import Done, Energy, Profiling
from zeusd.devices.simulated import Work

pl = late("lightning.pytorch")
accumulators = late("tensorboard.backend.event_processing.event_accumulator")
models = late("tests.zeus.power_limit.lightning_model")

ROOT = Path(__file__).parents[3]


def plugin(node: VirtualNode, **options: Any) -> power_limit.LightningGlobalPowerLimitOptimizer:
    return power_limit.LightningGlobalPowerLimitOptimizer(
        node.monitor(), Energy(), **{**SMALL, **options}
    )


def fit(
    plo: power_limit.LightningGlobalPowerLimitOptimizer,
    model: models.Model,
    tmp_path: Path,
    *callbacks: pl.Callback,
    **options: Any,
) -> pl.Trainer:
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": bool(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "default_root_dir": str(tmp_path),
        **options,
    }
    trainer = pl.Trainer(callbacks=[plo, *callbacks], **arguments)
    trainer.fit(model)
    return trainer


def test_the_package_that_the_program_uses_is_taken() -> None:
    program = """
        import pytorch_lightning
        from zeus.optimizer import LightningGlobalPowerLimitOptimizer
        assert issubclass(LightningGlobalPowerLimitOptimizer, pytorch_lightning.Callback)
    """
    subprocess.run(with_torch("-c", textwrap.dedent(program)), cwd=ROOT, check=True)


def test_the_best_limit_is_found_and_the_old_one_restored_at_the_end(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    plo = plugin(node)
    seen: list[float] = []
    model = models.Model(node, work, steps=STEPS + 5)
    model.before = lambda: seen.append(node.limit_w())
    fit(plo, model, tmp_path)
    assert_right(plo, expected)
    best = Energy().select(plo.measurements)
    assert isinstance(plo.state, Done)
    assert plo.state.optimal_power_limit == best * 1000
    assert list(dict.fromkeys(seen)) == LIMITS
    assert seen[-1] == best
    assert_given_back(node)


def test_validation_and_checkpoints_in_mid_epoch_are_not_measured(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    plo = plugin(node)
    model = models.Model(node, work, steps=130)
    fit(
        plo,
        model,
        tmp_path,
        pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=25, save_top_k=-1),
        limit_val_batches=2,
        num_sanity_val_steps=2,
        val_check_interval=7,
    )
    assert len(list(tmp_path.glob("*.ckpt"))) == 5
    assert_right(plo, expected)
    assert model.limits_apart <= {250, Energy().select(plo.measurements)}
    assert_given_back(node)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_that_nobody_foresaw_is_not_measured(
    node: VirtualNode,
    work: Work,
    expected: dict[float, float],
    tmp_path: Path,
    weights_only: bool,
) -> None:
    class Odd(pl.callbacks.ModelCheckpoint):
        def on_train_batch_end(self, trainer: pl.Trainer, *event: Any, **more: Any) -> None:
            if trainer.global_step in (9, 40):
                self._save_none_monitor_checkpoint(trainer, self._monitor_candidates(trainer))

    plo = plugin(node)
    saves = Odd(tmp_path, save_weights_only=weights_only, save_top_k=-1)
    fit(plo, models.Model(node, work, steps=STEPS + 40), tmp_path, saves)
    assert len(list(tmp_path.glob("*.ckpt"))) >= 2
    assert_right(plo, expected)


def test_short_epochs_with_a_validation_after_each(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    plo = plugin(node)
    with pytest.warns(UserWarning, match="shorter than"):
        fit(plo, models.Model(node, work, steps=8), tmp_path, max_epochs=14, limit_val_batches=2)
    assert_right(plo, expected)


def test_a_step_is_an_optimizer_step(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    plo = plugin(node)
    model = models.Model(node, work, steps=4 * (STEPS + 60) + 3, units=0.25)
    # Validations cut windows, every other amid a step: their limits are tried again.
    options: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 94}
    trainer = fit(plo, model, tmp_path, accumulate_grad_batches=4, **options)
    assert trainer.global_step == STEPS + 61
    assert_right(plo, expected)
    assert model.limits_apart <= {250, Energy().select(plo.measurements)}


def test_a_module_that_optimizes_by_hand(
    node: VirtualNode, work: Work, expected: dict[float, float], tmp_path: Path
) -> None:
    plo = plugin(node)
    trainer = fit(plo, models.Model(node, work, steps=STEPS + 5, by_hand=True), tmp_path)
    assert trainer.global_step == 0
    assert_right(plo, expected)


@pytest.mark.parametrize("error", [RuntimeError("no more memory"), KeyboardInterrupt()])
def test_after_an_error_limits_are_restored_and_the_same_callback_trains_again(
    node: VirtualNode,
    work: Work,
    expected: dict[float, float],
    tmp_path: Path,
    error: BaseException,
) -> None:
    plo = plugin(node)
    model = models.Model(node, work, steps=STEPS + 30)

    def fails() -> None:
        if node.limit_w() == 150 and isinstance(plo.state, Profiling):
            raise error

    model.before = fails
    with pytest.raises((RuntimeError, SystemExit)):
        fit(plo, model, tmp_path)
    assert_given_back(node)
    model.before = lambda: None
    model.rest(60)
    fit(plo, model, tmp_path)
    assert_right(plo, expected)
    assert_given_back(node)


def test_validation_alone_changes_nothing(node: VirtualNode, work: Work, tmp_path: Path) -> None:
    plo = plugin(node)
    model = models.Model(node, work, steps=5)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "logger": False}
    pl.Trainer(callbacks=[plo], accelerator="cpu", devices=1, **quiet).validate(model)
    assert not isinstance(plo.state, Done)
    plo.close()
    assert_given_back(node)


def test_an_internal_error_ends_the_search_and_not_the_training(
    node: VirtualNode, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plo = plugin(node)

    def broken() -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(plo.optimizer, "on_step_end", broken)
    with pytest.warns(UserWarning, match="training continues at the highest limit.*a defect"):
        trainer = fit(plo, models.Model(node, work, steps=20), tmp_path)
    assert trainer.global_step == 20
    assert plo.disabled
    assert_given_back(node)


def test_figures_go_to_every_logger(node: VirtualNode, work: Work, tmp_path: Path) -> None:
    plo = plugin(node)
    loggers = [
        pl.loggers.TensorBoardLogger(tmp_path, "board"),
        pl.loggers.CSVLogger(tmp_path, "csv"),
    ]
    fit(plo, models.Model(node, work, steps=60), tmp_path, logger=loggers)
    (events,) = (tmp_path / "board").rglob("events.out.tfevents.*")
    board = accumulators.EventAccumulator(str(events))
    board.Reload()
    assert [point.value for point in board.Scalars("zeus/power_limit_w")] == [250, 200, 150, 100]
    chosen = min(plo.measurements, key=lambda one: one.energy)
    assert [one.value for one in board.Scalars("zeus/chosen_power_limit_w")] == [chosen.power_limit]
    for point, one in zip(board.Scalars("zeus/step_energy_j"), plo.measurements, strict=True):
        assert point.value == pytest.approx(one.energy / SMALL["profile_steps"], rel=1e-4)
    (table,) = (tmp_path / "csv").rglob("metrics.csv")
    assert "zeus/step_time_s" in table.read_text()
    assert not plo.disabled


@pytest.mark.parametrize("block", snippets.of(ROOT / "docs" / "train" / "lightning.md"), ids=str)
def test_the_code_in_the_docs_runs(
    block: snippets.Block,
    node: VirtualNode,
    work: Work,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zeus.monitor.ZeusMonitor", lambda **options: node.monitor(**options))
    monkeypatch.setenv("LOCAL_RANK", "0")
    space = block.run(model=models.Model(node, work, steps=250), monitor=node.monitor())
    made = [
        one
        for one in space.values()
        if isinstance(one, power_limit.LightningGlobalPowerLimitOptimizer)
    ]
    assert all(not one.disabled for one in made)
    assert_given_back(node)
