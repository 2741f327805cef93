"""A leader's knowledge of its job: settings, selector, and measurements of earlier runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeus.optimizer.power_limit.adaptive import Adaptive
from zeus.optimizer.power_limit.estimates import Curve, LimitEstimate
from zeus.optimizer.power_limit.messages import RankHello
from zeus.optimizer.power_limit.profile import (
    PowerLimitMeasurement,
    Profile,
    ProfileError,
    ProfileFile,
)
from zeus.optimizer.power_limit.search import (
    Exhaustive,
    Reference,
    Search,
    SearchName,
    SettingsSearch,
    expected_steps,
    piece,
)
from zeus.optimizer.power_limit.selectors import OptimumSelector, ZeusCost, best, measurements
from zeus.optimizer.power_limit.settings import Beside, watts
from zeus.utils import framework
from zeus.utils.warn import warn

log = logging.getLogger(__name__)


@dataclass
class LimitPlanner:
    """Creates a search, makes its choice, saves its measurements.

    Args:
        selector: The criterion; None: `ZeusCost(eta_knob=0.5)`.
        warmup_steps: Unmeasured steps of each trial.
        profile_steps: Measured steps of each trial, and of the saved measurements.
        step_mw: Difference between limits, mW.
        file: The file of the measurements; None: they are not kept.
        beside: What to search beside limits.

    Attributes:
        limits_mw: The limits that may be tried, mW, descending.
    """

    name: SearchName
    selector: OptimumSelector | None
    warmup_steps: int
    profile_steps: int
    step_mw: int
    file: ProfileFile | None
    beside: Sequence[Beside] = ()
    limits_mw: list[int] = field(default_factory=list)
    _selector: OptimumSelector = field(init=False)  # for all GPUs that train together
    _participants: RankHello = field(init=False)
    _saved: list[Profile] = field(default_factory=list)

    def read_profile(self) -> bool:
        """Reads the saved measurements of an earlier run, for the next search. Returns whether
        there are any.
        """
        self._saved = []
        file = self.file
        if file is None:
            return False
        for path in (file.path, file.partial):
            try:
                if path.exists():
                    self._saved.append(file.load(path))
            except ProfileError as error:
                warn(f"{error}. It is measured again and replaced.")
        return bool(self._saved)

    def read_for_rank(self) -> bool:
        """Reads it in the process of rank 0."""
        return framework.rank() == 0 and self.read_profile()

    def begin(self, participants: RankHello) -> SettingsSearch:
        """Creates the search for these GPUs, with what is known about them."""
        self._participants = participants
        given = self.selector or ZeusCost(eta_knob=0.5)
        gpus = len(participants.gpus)
        self._selector = given.of(gpus) if isinstance(given, ZeusCost) else given
        self.limits_mw = scan(participants.min_mw, participants.max_mw, self.step_mw)
        saved = self._fitting(participants)
        if saved is None:
            return self._make(self.limits_mw)
        same = saved.selector in (None, _describe(self._selector))
        same = same and saved.beside == participants.beside
        limits = {round(one.power_limit * 1000) for one in saved.measurements} if same else set()
        search = self._make(sorted(limits.union(self.limits_mw), reverse=True))
        known = saved.as_samples(self.profile_steps)
        search.resume(
            [one for one in known if one.beside is None or one.beside in participants.beside],
            saved.position,
        )
        search.settled = same and saved.complete
        return search

    def _fitting(self, participants: RankHello) -> Profile | None:
        """Returns the first saved profile that fits these GPUs."""
        saved, self._saved = self._saved, []  # do not read again what is being measured again
        for one in saved:
            reason = one.check(participants.gpus, participants.min_mw, participants.max_mw)
            if reason is None:
                return one
            path = None if self.file is None else self.file.path
            warn(f"{path} {reason}. It is measured again and replaced.")
        return None

    def choose(self, estimates: Sequence[LimitEstimate]) -> LimitEstimate:
        """Returns the best candidate.

        Raises:
            ValueError: The selector fails, or chooses a limit that was not measured.
        """
        cautious = self.name == "adaptive"
        return best(self._selector, estimates, self.profile_steps, cautious=cautious)

    @property
    def expected_steps(self) -> int:
        """The maximum number of steps of a search."""
        limits, variants = len(self.limits_mw), len(self.beside)
        one = expected_steps(self.name, limits, self.warmup_steps, self.profile_steps)
        if not variants or self.name == "exhaustive":
            return one * (1 + variants)
        return 2 * one + variants * (self.warmup_steps + 2 * piece(self.profile_steps))

    def save(self, search: SettingsSearch, position: int, complete: bool) -> None:
        """Saves the measurements. A failure causes a warning."""
        estimates = search.estimates()
        if self.file is None or not estimates:
            return
        participants = self._participants
        profile = Profile(
            measurements=measurements(estimates, self.profile_steps),
            gpus=participants.gpus,
            range=(participants.min_mw / 1000, participants.max_mw / 1000),
            selector=_describe(self._selector),
            beside=participants.beside,
            complete=complete,
            position=position,
            samples=search.samples,
        )
        try:
            self.file.keep(profile)
        except OSError as error:
            warn(f"The power limit profile could not be written to {self.file.path}: {error}.")

    def _make(self, limits_mw: Sequence[int]) -> SettingsSearch:
        return SettingsSearch(
            lambda reference: self._of_limits(limits_mw, reference),
            self._participants.beside,
            self.choose,
            2 * piece(self.profile_steps) if self.name == "adaptive" else None,
        )

    def _of_limits(self, limits_mw: Sequence[int], reference: Reference) -> Search:
        """Creates the search of limits under one variant, or alone."""
        steps, selector = self.profile_steps, self._selector
        if self.name == "exhaustive":
            return Exhaustive(limits_mw, self.warmup_steps, steps)
        search = Adaptive(
            limits_mw,
            self.warmup_steps,
            steps,
            lambda curve: costs_of(selector, search.limits_mw, curve, reference()),
            lambda estimates, cautious: best(
                selector, [*reference(), *estimates], steps, cautious=cautious
            ),
            len(self._participants.gpus),
        )
        return search


def scan(min_mw: int, max_mw: int, step_mw: int) -> list[int]:
    """The limits to try, from the highest down; always including the lowest."""
    limits = list(range(max_mw, min_mw - 1, -step_mw))
    if limits[-1] != min_mw:
        limits.append(min_mw)
    return limits


def costs_of(
    selector: OptimumSelector,
    limits_mw: list[int],
    curve: Curve,
    reference: Sequence[LimitEstimate] = (),
) -> list[float] | None:
    """Returns the selector's costs of a curve over limits, mW, descending; None if there are none,
    or it fails, as a user's may. `reference` is compared with them.
    """
    time_s, energy_j = curve
    candidates = [(one.power_limit_mw, one.energy_j, one.time_s) for one in reference]
    candidates += zip(limits_mw, energy_j, time_s, strict=True)
    try:
        rows = [
            PowerLimitMeasurement(power_limit=watts(limit), energy=joules, time=seconds)
            for limit, joules, seconds in candidates
        ]
        costs = selector.costs(rows)
        return None if costs is None else costs[len(reference) :]
    except Exception as error:  # noqa: BLE001 - it may be a user's, and costs only some steps
        log.info("%s does not say what limits cost: %r", type(selector).__name__, error)
        return None


def _describe(selector: OptimumSelector) -> str:
    """Returns its name and arguments, to tell whether a profile was made for the same criterion."""
    arguments = ", ".join(
        f"{name}={value!r}"
        for name, value in sorted(vars(selector).items())
        if not name.startswith("_") and isinstance(value, (bool, int, float, str))
    )
    return f"{type(selector).__name__}({arguments})"
