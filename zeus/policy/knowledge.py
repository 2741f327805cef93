"""What was learnt of a job on one GPU, for the same job on another.

How many epochs a batch size needs does not depend on the GPU; what an epoch costs does, though the
sizes at which a GPU is busy are related.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from zeus.utils.atomic import write_text


@dataclass(frozen=True)
class Knowledge:
    """What a policy knows of a job.

    Attributes:
        batch_sizes: The sizes, ascending.
        log_epochs: Of each the logarithm of the epochs to the target.
        log_epoch_cost: Of each the logarithm of an epoch's cost, J.
        reached: Of each the runs that reached the target.
        missed: Of each the runs that did not, for another reason than their cost; need not be
            whole.
        best: The size of the lowest expected cost that has reached the target.
    """

    batch_sizes: tuple[int, ...]
    log_epochs: tuple[float, ...]
    log_epoch_cost: tuple[float, ...]
    reached: tuple[float, ...]
    missed: tuple[float, ...]
    best: int

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Knowledge:
        """From JSON.

        Raises:
            ValueError: It is none.
        """
        try:
            given = json.loads(text)
            sizes = tuple(int(size) for size in given["batch_sizes"])
            names = ("log_epochs", "log_epoch_cost", "reached", "missed")
            columns = [tuple(float(value) for value in given[name]) for name in names]
            best = int(given["best"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"no knowledge of a job: {error!r}") from None
        finite = all(math.isfinite(value) for column in columns for value in column)
        if (
            not finite
            or any(len(column) != len(sizes) for column in columns)
            or best not in sizes
            or list(sizes) != sorted(set(sizes))
            or sizes[0] <= 0
        ):
            raise ValueError("no knowledge of a job: its columns do not belong together")
        epochs, epoch_cost, reached, missed = columns
        return cls(sizes, epochs, epoch_cost, reached, missed, best)


def load(path: str | Path) -> Knowledge | None:
    """Reads a file that `save` has written; None where there is none.

    Raises:
        ValueError: It is something else; one sentence says which file.
        OSError: It cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return Knowledge.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path} has {error}; name another file, or remove it") from None


def save(path: str | Path, knowledge: Knowledge) -> None:
    """Writes it to a file.

    Raises:
        OSError: It cannot be written.
    """
    write_text(Path(path), knowledge.to_json() + "\n")
