"""Trains a small image classifier until `ZeusDataLoader` says that it is done.

    ZEUS_TARGET_METRIC=0.7 python train.py --batch_size 64

`run_zeus.py` starts it for each run of a recurring job. All that makes it one is in `main`.
"""

from __future__ import annotations

import argparse
import sys

import torch
from data import images
from model import network
from simulated import GpuWork
from torch.nn.functional import cross_entropy

from zeus.run import ZeusCostThresholdExceededError, ZeusDataLoader

EVAL_UNITS = 0.3
"""An evaluation's step is a forward pass, about a third of a training step's work."""


def main() -> int:
    """Trains. Returns the exit code."""
    options = parse()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    work = GpuWork(options.batch_size)

    train_loader = ZeusDataLoader(
        images(options.samples, seed=1),
        batch_size=options.batch_size,
        max_epochs=options.epochs,
        shuffle=True,
    )
    eval_loader = ZeusDataLoader(
        images(options.samples // 4, seed=2), batch_size=options.batch_size
    )
    try:
        for epoch in train_loader.epochs():
            model.train()
            for pictures, labels in train_loader:
                with work.step():
                    loss = cross_entropy(model(pictures.to(device)), labels.to(device))
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
            model.eval()
            right = 0
            for pictures, labels in eval_loader:
                with work.step(EVAL_UNITS), torch.no_grad():
                    right += int((model(pictures.to(device)).argmax(1).cpu() == labels).sum())
            accuracy = right / (options.samples // 4)
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.1%}")
            train_loader.report_metric(accuracy, higher_is_better=True)
    except ZeusCostThresholdExceededError as error:
        print(error)  # the result is written; ZeusMaster goes on with another batch size
        return 1
    return 0


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--epochs", type=int, default=30, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=2048, help="of an epoch")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
