"""A model that keeps a simulated GPU busy with each batch, as each trainer wants it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from zeusd.devices.simulated import Work

torch.set_num_threads(1)  # more only wait for each other with models so small

STEPS = 12


class Model(torch.nn.Module):
    """For Hugging Face's Trainer."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.busy = work

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.busy.run(1)
        self.busy.wait()
        return {"loss": self.layer(x).square().mean()}


class Module(pl.LightningModule):
    """The same for Lightning."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model = Model(work)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.model(batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(STEPS // 2, 4), batch_size=1)
