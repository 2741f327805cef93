"""A LightningModule whose training keeps a simulated GPU busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.zeus.node import VirtualNode
from zeusd.devices.simulated import Work

torch.set_num_threads(1)  # more only wait for each other with models so small


class Model(pl.LightningModule):
    """Keeps the GPU busy with each batch; validating and gathering its weights take long."""

    def __init__(
        self, node: VirtualNode, work: Work, *, steps: int, units: float = 1.0, **by_hand: Any
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.node, self.work, self.steps, self.units = node, work, steps, units
        self.automatic_optimization = not by_hand
        self.before: Callable[[], None] = lambda: None
        self.limits_apart: set[float] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.before()
        self.work.run(self.units)
        loss = self.layer(batch).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers(use_pl_optimizer=False)  # whose steps nobody counts
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.apart(8)
        self.log("val_loss", self.layer(batch).square().mean())

    def state_dict(self, *args: Any, **options: Any) -> Any:
        self.apart(6)
        return super().state_dict(*args, **options)

    def apart(self, seconds: float) -> None:
        """Something other than training takes long."""
        self.limits_apart.add(self.node.limit_w())
        self.rest(seconds)

    def rest(self, seconds: float) -> None:
        self.work.wait()
        self.node.clock.sleep(seconds)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(self.steps, 4), batch_size=1)

    def val_dataloader(self) -> Any:
        node, rest = self.node, self.rest

        class Workers(DataLoader):
            def __iter__(self) -> Any:
                rest(8)  # as starting them takes long
                assert node
                return super().__iter__()

        return Workers(torch.randn(2, 4), batch_size=1)
