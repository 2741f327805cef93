"""The callbacks that only measure, in real trainers with a tiny model and a simulated GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests import snippets
from tests.late import late
from tests.snippets import ROOT
from tests.support import running_daemon
from tests.zeus.node import VirtualNode
from zeus import _node, measure
from zeus.monitor import ZeusMonitor
from zeusd.devices.simulated import Work

torch = late("torch")
transformers = late("transformers")
pl = late("lightning.pytorch")
accumulators = late("tensorboard.backend.event_processing.event_accumulator")
swa = late("torch.optim.swa_utils")
tiny = late("tests.zeus.measure.tiny_models")
spawned = late("tests.zeus.measure.spawned_model")

PAGE = ROOT / "docs/train/measuring_only.md"
STEP_J = 24.0
"""240 W for 0.1 s."""


def test_hugging_face_logs_figures_where_the_loss_goes(
    node: VirtualNode, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    callback = measure.HFEnergyCallback(node.monitor(), log_every=4, price=0.2, print_summary=False)
    trainer = transformers.Trainer(
        model=tiny.Model(work),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            num_train_epochs=2,
            logging_steps=3,
            save_strategy="no",
            report_to=["tensorboard"],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"x": torch.randn(4)} for _ in range(tiny.STEPS // 2)],
        callbacks=[callback],
    )
    callback.attach(trainer)
    assert sum(one is callback for one in trainer.callback_handler.callbacks) == 1
    trainer.train()
    summary = callback.summary
    assert summary is not None
    assert (summary.steps, summary.epochs) == (tiny.STEPS, 2)
    assert summary.step_energy == pytest.approx(STEP_J, rel=0.1)
    names = {name for entry in trainer.state.log_history for name in entry}
    assert names >= {"energy/step_J", "energy/power_W", "energy/epoch_J", "energy/total_kWh"}
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == tiny.STEPS // 3, "the trainer's own log is as it was"
    (folder,) = {path.parent for path in (tmp_path).rglob("events.out.tfevents.*")}
    events = accumulators.EventAccumulator(str(folder)).Reload()
    (total,) = events.Scalars("train/energy/total_kWh")
    assert total.value == pytest.approx(summary.kwh, rel=1e-5)


def test_lightning_logs_figures_to_its_loggers(
    node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    callback = measure.LightningEnergyCallback(
        node.monitor(), log_every=4, carbon_intensity=400, print_summary=False
    )
    logger = pl.loggers.CSVLogger(tmp_path)
    pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=logger,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(tiny.Module(work))
    summary = callback.summary
    assert summary is not None
    assert (summary.steps, summary.epochs) == (tiny.STEPS, 2)
    assert summary.step_energy == pytest.approx(STEP_J, rel=0.1)
    logger.save()
    header = Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"energy/step_J", "energy/epoch_J", "energy/total_kWh", "energy/co2_g"} <= set(header)
    trainer, module = pl.Trainer(logger=False), tiny.Module(work)
    callback.on_train_start(trainer, module)
    assert callback.summary is None
    callback.on_exception(trainer, module, KeyboardInterrupt())
    assert callback.summary is not None
    assert callback.summary.steps == 0


def test_the_code_on_the_page_runs(
    node: VirtualNode, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zeus.measure.callback.ZeusMonitor", node.monitor)
    (block,) = [one for one in snippets.of(PAGE) if "Trainer" in one.source]
    space = block.run(
        Trainer=transformers.Trainer,
        model=tiny.Model(work),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True
        ),
        data=[{"x": torch.randn(4)} for _ in range(3)],
        pl=pl,
    )
    assert space["callback"].summary.steps == 3
    assert space["callback"].summary.cost == pytest.approx(0.3 * space["callback"].summary.kwh)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_hugging_face_has_a_summary_after_an_interruption(
    node: VirtualNode, work: Work, tmp_path: Path, error: type[BaseException]
) -> None:
    """The trainer tells its callbacks nothing of it."""
    callback = measure.HFEnergyCallback(node.monitor(), print_summary=False)
    during: list[object] = []

    class Model(tiny.Model):
        left = 6

        def forward(self, x: object) -> object:
            during.append(callback.summary)
            self.left -= 1
            if not self.left:
                raise error
            return super().forward(x)

    def trainer() -> object:
        return transformers.Trainer(
            model=Model(work),
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=1,
                num_train_epochs=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=[{"x": torch.randn(4)} for _ in range(tiny.STEPS)],
            callbacks=[callback],
        )

    for _ in range(2):
        with pytest.raises(error):
            trainer().train()
        node.clock.sleep(100)  # in a notebook, say
        summary = callback.summary
        assert summary is not None
        assert summary.steps == 5
        assert summary.time < 2
        assert summary.energy == pytest.approx(5 * STEP_J, rel=0.1)
        assert callback.summary is summary
    assert set(during) == {None}


def test_compiled_and_scripted_modules_and_functions_are_measured(node: VirtualNode) -> None:
    names: list[str] = []
    measured = measure.measure_energy(
        monitor=node.monitor(), report=lambda name, window: names.append(name)
    )
    module, x = torch.nn.Linear(2, 1), torch.ones(2)
    traced = torch.jit.trace(torch.abs, x)
    for one in (
        *(module, torch.jit.script(module), torch.compile(module, backend="eager")),
        *(torch.compile(torch.abs, backend="eager"), traced),
    ):
        assert measured(one)(x).tolist() == one(x).tolist()
    assert len(names) == 5
    assert names[:3] == ["Linear", "RecursiveScriptModule", "OptimizedModule"]


def test_a_model_with_a_monitor_is_averaged(node: VirtualNode, tmp_path: Path) -> None:
    module = spawned.Module(ZeusMonitor(), tmp_path / "report")
    threads = threading.active_count()
    average = swa.AveragedModel(module).module
    assert threading.active_count() == threads
    assert isinstance(average.monitor, ZeusMonitor)
    assert average.monitor.gpu_indices == [0]


@pytest.mark.timeout(300)  # its process imports all that this one has, too
@_node.use(None)
def test_lightning_spawns_processes_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with running_daemon("--simulate", "v100", gpus=1) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        _spawn(ZeusMonitor(), tmp_path / "report")
    steps, energy = (tmp_path / "report").read_text().split()
    assert int(steps) == 6
    assert float(energy) > 0


def _spawn(monitor: ZeusMonitor, report: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="ddp_spawn",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[measure.LightningEnergyCallback(monitor)],
    )
    trainer.fit(spawned.Module(monitor, report))
