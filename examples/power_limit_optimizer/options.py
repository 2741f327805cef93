"""The command line that the scripts share, and its errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from zeus.exceptions import ZeusBaseError
from zeus.optimizer.power_limit import MaxSlowdownConstraint, OptimumSelector
from zeus_ipc.errors import ZeusIpcError

MAX_SLOWDOWN_ENV = "ZEUS_MAX_SLOWDOWN"


class Options(argparse.Namespace):
    """The parsed command line."""

    data_dir: Path | None
    synthetic: bool
    gpu: int
    arch: str
    epochs: int
    batch_size: int
    steps_per_epoch: int | None
    image_size: int
    workers: int
    lr: float
    amp: bool
    seed: int
    checkpoint: Path | None
    resume: Path | None
    profile_path: Path | None
    warmup_steps: int
    profile_steps: int
    pl_step: int


def parse(description: str, one_gpu: bool = False) -> Options:
    """Reads the command line.

    Args:
        description: For --help; its first paragraph is used.
        one_gpu: Whether the script takes --gpu.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    parser.add_argument(
        "data_dir", nargs="?", type=Path, help="folder with train/CLASS/ and val/CLASS/"
    )
    add = parser.add_argument
    add("--synthetic", action="store_true", help="random images instead of DATA_DIR")
    if one_gpu:
        add("--gpu", type=int, default=0, help="index in CUDA_VISIBLE_DEVICES (0)")
    add("--arch", default="resnet50", help="torchvision's name of a model, or tiny (resnet50)")
    add("--epochs", type=positive_integer, default=90, help="90")
    add("--batch-size", type=positive_integer, default=256, help="per GPU (256)")
    add("--steps-per-epoch", type=positive_integer, help="limit, also for an evaluation (all)")
    add("--image-size", type=positive_integer, default=224, help="224")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=int, default=min(4, cores), help="processes per GPU that read images (4)")
    add(
        "--lr",
        type=float,
        default=0.1,
        help="learning rate, divided by ten after each 30 epochs (0.1)",
    )
    add("--amp", action="store_true", help="compute in bfloat16 where it is safe")
    add("--seed", type=int, default=0, help="0")
    add("--checkpoint", type=Path, help="checkpoint file, written after each epoch")
    add("--resume", type=Path, help="checkpoint of any of the scripts to resume from")
    add("--profile-path", type=Path, help="JSON file that stores the measurements for the next run")
    add("--warmup-steps", type=int, default=10, help="unmeasured steps at each limit (10)")
    add(
        "--profile-steps",
        type=positive_integer,
        default=40,
        help="measured steps at each limit (40)",
    )
    add("--pl-step", type=positive_integer, default=25, help="distance between limits, W (25)")
    options = parser.parse_args(namespace=Options())
    if options.synthetic == (options.data_dir is not None):
        fail("give either DATA_DIR or --synthetic")
    if options.resume is not None and not options.resume.is_file():
        fail(f"there is no checkpoint {options.resume}")
    return options


def selector() -> OptimumSelector | None:
    """Returns the factor in ZEUS_MAX_SLOWDOWN; None, for the library's default, if it is empty."""
    text = os.environ.get(MAX_SLOWDOWN_ENV, "1.1")
    if not text:
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not factor >= 1:
        fail(f"{MAX_SLOWDOWN_ENV} must be a number of at least 1, such as 1.1, not {text!r}")
    return MaxSlowdownConstraint(factor)


@contextlib.contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Exits with the message of an error that the user can fix."""
    try:
        yield
    except (ZeusBaseError, ZeusIpcError, ValueError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Exits as argparse does for invalid options."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def positive_integer(text: str) -> int:
    """Type of a command line option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
