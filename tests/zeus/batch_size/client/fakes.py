"""A monitor that measures given values, and trials that can be unreachable."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zeus.exceptions import ZeusdError
from zeus.monitor import Measurement
from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.store import Store
from zeus.optimizer.batch_size.trials import Trial

JOB_ID = "cifar-v100"


def job(**more: Any) -> JobSpec:
    """A job whose first size is 64. At eta 1 a run costs its energy."""
    usual = {
        "job_id": JOB_ID,
        "job_id_prefix": "cifar",
        "batch_sizes": [16, 32, 64, 128],
        "default_batch_size": 64,
        "eta_knob": 1.0,
        "max_epochs": 10,
        "mab_seed": 1,
    }
    return JobSpec.model_validate({**usual, **more})


class FakeMonitor:
    """A `ZeusMonitor` whose time and energy are given.

    Args:
        models: Of its GPUs, each of 250 W.
    """

    def __init__(self, *models: str) -> None:
        info = SimpleNamespace(power_limit_max_mw=250_000)
        self.gpus = [
            SimpleNamespace(
                info=info,
                get_name=lambda name=name: name,
                get_power_management_limit_constraints=lambda: self.range_mw,
            )
            for name in models or ("Tesla V100",)
        ]
        self.range_mw = 100_000, 250_000
        self.gpu_indices = list(range(len(self.gpus)))
        self.measurement_states: dict[str, tuple[float, float]] = {}
        self.now = (0.0, 0.0)
        self.gone = False

    def use(self, time_s: float, energy_j: float) -> None:
        """So much passes, and is used."""
        self.now = (self.now[0] + time_s, self.now[1] + energy_j)

    def begin_window(self, key: str, restart: bool = False) -> None:
        assert restart
        self.measurement_states[key] = self.now

    def end_window(self, key: str, cancel: bool = False) -> Any:
        if key not in self.measurement_states:
            raise ValueError(f"Measurement window '{key}' does not exist")
        time_s, energy_j = self.measurement_states.pop(key)
        return _Unread(self, self.now[0] - time_s, self.now[1] - energy_j)


class _Unread(Measurement):
    """Its energy cannot be known while its monitor's sensors are gone."""

    def __init__(self, monitor: FakeMonitor, time_s: float, energy_j: float) -> None:
        super().__init__(time_s, {0: energy_j})
        self.monitor = monitor

    @property
    def total_energy(self) -> float:
        if self.monitor.gone:
            raise ZeusdError("zeusd is away; start it.")
        return super().total_energy


class Between:
    """Trials in another place, and the transport to it.

    Args:
        path: Of the store that keeps them.

    Attributes:
        fails: What every call raises meanwhile, but closing.
        asked: Names of the calls that got through, and that did not.
        asking: Names of the threads that called.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fails: Exception | None = None
        self.asked: list[str] = []
        self.asking: list[str] = []
        self.lease_s: float | None = 600.0
        self.open = 0
        self.changed: dict[str, Any] = {}

    def __call__(self, path: Any) -> _Opened:
        """Replaces `Store`."""
        if isinstance(self.fails, ZeusBSORuntimeError):
            self.asked.append("open")
            raise self.fails
        self.open += 1
        return _Opened(self, Store(path, lease_s=self.lease_s))

    def store(self) -> Store:
        """The stored trials."""
        return Store(self.path)

    def away(self) -> None:
        """Nobody answers."""
        self.fails = ZeusBSORuntimeError("nobody answers; start it.", 0)

    def trials(self, job_id: str = JOB_ID) -> list[Trial]:
        """All trials of a job."""
        store = self.store()
        try:
            return store.job(job_id)[1]
        finally:
            store.close()


class _Opened:
    def __init__(self, between: Between, store: Store) -> None:
        self._between = between
        self._store = store

    def __getattr__(self, name: str) -> Any:
        """A call of the store, unless it fails."""
        between = self._between

        def ask(*given: Any) -> Any:
            between.asked.append(name)
            between.asking.append(threading.current_thread().name)
            if between.fails is not None:
                raise between.fails
            answer = getattr(self._store, name)(*given)
            return answer.model_copy(update=between.changed) if name == "begin_trial" else answer

        return ask

    def close(self) -> None:
        self._between.open -= 1
        self._store.close()


def epochs(
    optimizer: BatchSizeOptimizer, monitor: Any, *metrics: Any, joules: float = 100.0
) -> int:
    """Trains until it must stop, with an epoch of 2 s for each metric. Returns the epochs."""
    for number, metric in enumerate(metrics, 1):
        monitor.use(2.0, joules)
        optimizer.on_evaluate(metric)
        if optimizer.training_finished:
            return number
    return len(metrics)
