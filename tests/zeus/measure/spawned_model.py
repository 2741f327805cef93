"""A Lightning model with a monitor of its own, for processes that Lightning spawns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from zeus.monitor import ZeusMonitor

torch.set_num_threads(1)


class Module(pl.LightningModule):
    """Writes what its monitor and the first callback have measured."""

    def __init__(self, monitor: ZeusMonitor, report: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.monitor = monitor
        self.report = report

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        with self.monitor.window("step") as self.window:
            return self.layer(batch).square().mean()

    def on_fit_end(self) -> None:
        (callback,) = (one for one in self.trainer.callbacks if hasattr(one, "summary"))
        self.report.write_text(f"{callback.summary.steps} {self.window.total_energy}")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(6, 4), batch_size=1)
