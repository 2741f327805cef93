"""What was learnt of a job on one GPU, for the same job on another or under other power limits.

How many epochs a batch size needs does not depend on the GPU; what an epoch costs does, though the
sizes at which a GPU is busy are related. Under other power limits the same GPU is nearly the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zeus_common.atomic import write_text
from zeus_ipc.parsing import any_number, parse, read_file


@dataclass(frozen=True)
class Place:
    """What a job trains on.

    Attributes:
        gpu_model: Product name of its GPUs; empty where it is not known.
        power_limits: The lowest and the highest power limit that it may set, W; None: not known.
    """

    gpu_model: str = ""
    power_limits: tuple[float, float] | None = None


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
        place: What it was learnt on.
        same_gpu: Whether that is the GPU model on which it is used.
    """

    batch_sizes: tuple[int, ...]
    log_epochs: tuple[float, ...]
    log_epoch_cost: tuple[float, ...]
    reached: tuple[float, ...]
    missed: tuple[float, ...]
    best: int
    place: Place = Place()
    same_gpu: bool = False

    def __post_init__(self) -> None:
        columns = (self.log_epochs, self.log_epoch_cost, self.reached, self.missed)
        sizes = list(self.batch_sizes)
        if (
            any(len(column) != len(sizes) for column in columns)
            or not all(math.isfinite(value) for column in columns for value in column)
            or self.best not in sizes
            or sizes != sorted(set(sizes))
            or sizes[0] <= 0
        ):
            raise ValueError("its columns do not belong together")

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Knowledge:
        """From JSON.

        Raises:
            ValueError: It is none.
        """
        return _of(parse(text, decode=any_number))


def _of(given: Any) -> Knowledge:
    from pydantic import TypeAdapter, ValidationError

    from zeus_common.text import explain

    try:
        return TypeAdapter(Knowledge).validate_python(given)
    except ValidationError as error:
        raise ValueError(explain(error.errors()[0])) from None


def by_nearness(place: Place, here: Place, runs: float) -> tuple[bool, bool, float]:
    """Sorts what is known of a job by how much it says here, the most first: of this GPU model, of
    these power limits, of many runs.
    """
    same_gpu = place.gpu_model == here.gpu_model != ""
    return not same_gpu, place.power_limits != here.power_limits, -runs


def nearest(known: Iterable[Knowledge], here: Place) -> Knowledge | None:
    """What says most about a job here; None where nothing is known."""
    ordered = sorted(known, key=lambda one: by_nearness(one.place, here, sum(one.reached)))
    if not ordered:
        return None
    same_gpu = ordered[0].place.gpu_model == here.gpu_model != ""
    return replace(ordered[0], same_gpu=same_gpu)


def load(path: str | Path, here: Place = Place()) -> Knowledge | None:
    """Reads what a file that `save` has written says about a job here; None where there is none.

    Raises:
        ValueError: It is something else; one sentence says which file.
        OSError: It cannot be read.
    """
    return nearest(_read(path), here)


def save(path: str | Path, knowledge: Knowledge) -> None:
    """Writes it to a file, which keeps what was learnt in other places.

    Raises:
        ValueError: There is a file of something else.
        OSError: It cannot be written.
    """
    others = [asdict(one) for one in _read(path) if one.place != knowledge.place]
    given = {**asdict(knowledge), "elsewhere": others}
    write_text(Path(path), json.dumps(given) + "\n")


def _read(path: str | Path) -> list[Knowledge]:
    try:
        given = parse(read_file(path), decode=any_number)
        others = given.get("elsewhere", []) if isinstance(given, dict) else []
        return [_of(one) for one in (given, *others)]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} has no knowledge of a job: {error}; name another file, or remove it"
        ) from None
