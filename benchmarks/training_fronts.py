"""The ways to measure that `training_cost.py` compares, each as a `Front` of a training loop."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

STEPS = 100_000
"""More than any row takes."""

Hook = Callable[[], Any]
Step = Callable[[], bool]
"""Returns whether another one follows."""


def _nothing() -> None: ...


@dataclass
class Front:
    """One way to measure: called before and after each step, and at the end."""

    begin: Hook = _nothing
    end: Hook = _nothing
    close: Hook = _nothing

    def drive(self, step: Step) -> None:
        """Runs all steps."""
        more = True
        while more:
            self.begin()
            more = step()
            self.end()
        self.close()


@dataclass
class Trainer(Front):
    """A trainer with a loop of its own.

    Attributes:
        train: Runs all steps, with a callback or without.
    """

    train: Callable[[Step, Any], None] = lambda step, callback: None
    callback: Any = None

    def drive(self, step: Step) -> None:
        self.train(step, self.callback)


@dataclass
class Job:
    """What a front measures."""

    gpus: list[int]

    @cached_property
    def monitor(self) -> Any:
        """A `ZeusMonitor` of these GPUs."""
        from zeus.monitor import ZeusMonitor

        return ZeusMonitor(self.gpus)


def _windows(job: Job) -> Front:
    monitor, kept = job.monitor, []

    def end() -> Any:
        kept.append(monitor.end_window("step"))
        return kept[-1]

    return Front(lambda: monitor.begin_window("step"), end)


def _reads(job: Job) -> Front:
    windows = _windows(job)
    return Front(windows.begin, lambda: windows.end().total_energy)


def _callback(**options: Any) -> Callable[[Job], Front]:
    def front(job: Job) -> Front:
        from zeus.measure import EnergyCallback

        callback = EnergyCallback(job.monitor, print_summary=False, **options)
        callback.on_train_begin()
        return Front(callback.on_step_begin, callback.on_step_end, callback.on_train_end)

    return front


def _decorator(job: Job) -> Front:
    from zeus.measure import measure_energy

    block = measure_energy("step", monitor=job.monitor)
    return Front(lambda: block.__enter__(), lambda: block.__exit__(None, None, None))


def _rated(kind: str) -> Callable[[Job], Front]:
    def front(job: Job) -> Front:
        from zeus.monitor.carbon import CarbonEmissionMonitor, ElectrictyMapsClient
        from zeus.monitor.price import EnergyCostMonitor, OpenEIClient

        nobody = "http://10.255.255.1"  # packets to it get no answer
        if kind == "carbon":
            monitor: Any = CarbonEmissionMonitor(ElectrictyMapsClient((0, 0), url=nobody), job.gpus)
        else:
            provider = OpenEIClient((0, 0), "label", api_key="key", url=nobody)
            monitor = EnergyCostMonitor(provider, job.gpus)
        return Front(lambda: monitor.begin_window("step"), lambda: monitor.end_window("step"))

    return front


def _metrics(job: Job) -> Front:
    from zeus.metric import EnergyCumulativeCounter

    metric = EnergyCumulativeCounter([], job.gpus, 1.0, "http://127.0.0.1:9", "job")
    return Front(
        lambda: metric.begin_window("step"), lambda: metric.end_window("step"), metric.close
    )


def _optimizer(job: Job) -> Front:
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

    plo = GlobalPowerLimitOptimizer(job.monitor)
    plo.on_epoch_begin()
    return Front(plo.on_step_begin, plo.on_step_end, plo.close)


def _train_with_hugging_face(step: Step, callback: Any) -> None:
    import torch
    from transformers import Trainer as HFTrainer
    from transformers import TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.more = True

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.more = step()
            return {"loss": self.layer(x).mean()}

    class Until(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            control.should_training_stop = not model.more

    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=STEPS,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        callbacks = [Until(), *([] if callback is None else [callback])]
        data = [{"x": torch.zeros(1)}] * STEPS
        HFTrainer(model, arguments, train_dataset=data, callbacks=callbacks).train()


def _train_with_lightning(step: Step, callback: Any) -> None:
    import torch
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.more = True

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.more = step()
            loss: torch.Tensor = self.layer(batch).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            while model.more:
                yield torch.zeros(1)

    model = Model()
    LightningTrainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
    ).fit(model, torch.utils.data.DataLoader(Data()))


def _train_with_data_loader(step: Step, loader: Any) -> None:
    import torch

    data = torch.utils.data.TensorDataset(torch.zeros(STEPS, 1))
    batches = torch.utils.data.DataLoader(data) if loader is None else loader
    for _ in range(1) if loader is None else loader.epochs():
        for _ in batches:
            if not step():
                break
        if loader is not None:
            loader.report_metric(1.0, higher_is_better=True)


def _trainer(name: str) -> Callable[[Job], Front]:
    def front(job: Job) -> Front:
        from zeus import measure
        from zeus.optimizer import power_limit

        if name.endswith("Optimizer"):
            callback = getattr(power_limit, name)(job.monitor)
        else:
            callback = getattr(measure, name)(job.monitor, print_summary=False)
        return Trainer(train=train, callback=callback)

    train = _train_with_hugging_face if name.startswith("HF") else _train_with_lightning
    return front


def _data_loader(job: Job) -> Front:
    import torch

    from zeus.run import ZeusDataLoader

    data = torch.utils.data.TensorDataset(torch.zeros(STEPS, 1))
    loader = ZeusDataLoader(data, batch_size=1, max_epochs=1)
    return Trainer(train=_train_with_data_loader, callback=loader)


def _scheduler() -> Front:
    sys.path.insert(0, str(Path(__file__).parent / "serving"))
    from step_cost import Scheduler

    return Front(Scheduler(64, renew=True).step)


def _vllm(job: Job) -> Front:
    from step_cost import Probed  # as `_scheduler` has found it

    from zeus.serving.vllm.probe import install

    install(Probed)
    return Front(Probed(64, renew=True).step)


def _ml_energy(job: Job) -> Front:
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=job.gpus, cpu_indices=[])
    return Front(
        lambda: monitor.begin_window("step", sync_execution=False),
        lambda: monitor.end_window("step", sync_execution=False),
    )


def _codecarbon(job: Job) -> Front:
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(
        country_iso_code="DEU", measure_power_secs=1, save_to_file=False, log_level="error"
    )
    tracker.start()
    return Front(close=tracker.stop)


def _nvitop(job: Job) -> Front:
    from nvitop import Device, ResourceMetricCollector

    collector = ResourceMetricCollector(Device.from_indices(job.gpus), interval=1.0)
    collector.daemonize(lambda metrics: True)
    return Front()


def _log(figures: dict[str, float], step: int) -> None: ...


FRONTS: dict[str, Callable[[Job], Front]] = {
    "bare": lambda job: Front(),
    "windows": _windows,
    "callback": _callback(),
    "callback-10": _callback(log=_log, log_every=10),
    "callback-1": _callback(log=_log, log_every=1),
    "huggingface": _trainer("HFEnergyCallback"),
    "lightning": _trainer("LightningEnergyCallback"),
    "decorator": _decorator,
    "carbon": _rated("carbon"),
    "price": _rated("price"),
    "metrics": _metrics,
    "optimizer": _optimizer,
    "hf-optimizer": _trainer("HFGlobalPowerLimitOptimizer"),
    "pl-optimizer": _trainer("LightningGlobalPowerLimitOptimizer"),
    "data-loader": _data_loader,
    "vllm": _vllm,
    "reads": _reads,
}
"""The last one reads each window's energy at once, and so waits for each update."""

QUIET = ("decorator",)
"""They print much."""

BARE: dict[str, Callable[[], Front]] = {
    "huggingface": lambda: Trainer(train=_train_with_hugging_face),
    "hf-optimizer": lambda: Trainer(train=_train_with_hugging_face),
    "lightning": lambda: Trainer(train=_train_with_lightning),
    "pl-optimizer": lambda: Trainer(train=_train_with_lightning),
    "data-loader": lambda: Trainer(train=_train_with_data_loader),
    "vllm": _scheduler,
}
"""What they run in, without them; of the others, a loop."""

PEERS: dict[str, Callable[[Job], Front]] = {
    "ml-energy-zeus": _ml_energy,
    "codecarbon": _codecarbon,
    "nvitop": _nvitop,
}
