"""One stage of a pipeline, and its training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import model
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from zeus.callback import Callback, CallbackSet
from zeus.monitor import ZeusMonitor
from zeus.optimizer.pipeline_frequency.torch_pipelining import instrument

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
MICROBATCH = 4


@dataclass(frozen=True)
class Phase:
    """Time, energy and result of some iterations.

    Attributes:
        time_s: Per iteration.
        energy_j: Per iteration, of all GPUs.
        first_loss, last_loss: Of the first and the last iteration.
        accuracy: Share of words predicted correctly, after all iterations.
    """

    time_s: float
    energy_j: float
    first_loss: float
    last_loss: float
    accuracy: float


class Trainer:
    """One stage of the pipeline.

    Args:
        schedule: `1f1b` or `gpipe`.
        num_mbs: Microbatches of an iteration.
        device: Where the stage is.
        monitor: Of this process's GPU.
    """

    def __init__(
        self, schedule: str, num_mbs: int, device: torch.device, monitor: ZeusMonitor
    ) -> None:
        self.num_mbs, self.device, self.monitor = num_mbs, device, monitor
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        module = model.make_stage(self.rank, self.world).to(device)
        self.optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        stage = PipelineStage(module, self.rank, self.world, device)
        self.schedule = SCHEDULES[schedule](stage, num_mbs, loss_fn=model.loss)
        # Called for each instruction that the schedule runs.
        self.told = CallbackSet([])
        instrument(self.schedule, stage, self.told)
        self.trained = 0

    def train(self, callbacks: Sequence[Callback], warmup: int, iterations: int) -> Phase:
        """Runs some warm-up iterations, and then some that are measured."""
        self.told.callbacks = list(callbacks)
        for _ in range(warmup):
            self.step()
        self.evaluate()
        dist.barrier()
        with self.monitor.window("iterations") as window:
            losses = [self.step() for _ in range(iterations)]
            # The stages end one after another; the iteration ends with the last of them.
            dist.barrier()
        accuracy = self.evaluate()
        figures = torch.tensor(
            [window.total_energy, *losses], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(figures)
        joules, *losses = figures.tolist()
        return Phase(window.time / iterations, joules / iterations, losses[0], losses[-1], accuracy)

    def train_until(self, callbacks: Sequence[Callback], ready: Callable[[], bool]) -> int:
        """Trains until all processes are ready. Returns the number of iterations."""
        self.told.callbacks = list(callbacks)
        before = self.trained
        all_ready = torch.zeros((), device=self.device)
        while not all_ready:
            self.step()
            all_ready.fill_(ready())
            dist.all_reduce(all_ready, dist.ReduceOp.MIN)
        return self.trained - before

    def step(self) -> float:
        """One iteration: all microbatches forward and backward, then the weights.

        Returns:
            The loss on the last stage, and 0 on the others.
        """
        sentences, following = self._batch(self.trained)
        self.trained += 1
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(sentences)
        elif self.rank == self.world - 1:
            self.schedule.step(target=following, losses=losses, return_outputs=False)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().item() if losses else 0.0

    @torch.no_grad()
    def evaluate(self) -> float:
        """Share of words of held-out sentences predicted correctly.

        No plan contains the evaluation.
        """
        sentences, following = self._batch(10**6)
        first, last = self.rank == 0, self.rank == self.world - 1
        logits = self.schedule.eval(
            *([sentences] if first else []), target=following if last else None
        )
        right = torch.zeros((), device=self.device)
        if logits is not None:
            right = (logits.argmax(-1) == following).float().mean()
        dist.all_reduce(right)
        return right.item()

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return model.batch(number, self.num_mbs * MICROBATCH, self.device)
