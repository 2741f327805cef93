"""A leader's knowledge of its job: limits, selector, and measurements of earlier runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from zeus.optimizer.power_limit.adaptive import Adaptive
from zeus.optimizer.power_limit.choice import best, choose, measurements
from zeus.optimizer.power_limit.estimates import LimitCurve, LimitEstimate
from zeus.optimizer.power_limit.leader import Participants
from zeus.optimizer.power_limit.profile import (
    PowerLimitMeasurement,
    Profile,
    ProfileError,
    ProfileFile,
    SampleRow,
    watts,
)
from zeus.optimizer.power_limit.search import Exhaustive, Search, SearchName, expected_steps, piece
from zeus.optimizer.power_limit.selectors import OptimumSelector, ZeusCost
from zeus.optimizer.power_limit.with_profiles import Reference, WithProfiles
from zeus.utils import framework
from zeus.utils.warn import warn
from zeus_ipc.controls import profile_name

log = logging.getLogger(__name__)


class LimitPlanner:
    """Creates a search, makes its choice, saves its measurements."""

    def __init__(
        self,
        name: SearchName,
        selector: OptimumSelector | None,
        warmup_steps: int,
        profile_steps: int,
        step_mw: int,
        file: ProfileFile | None,
        profiles: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.warmup_steps = warmup_steps
        self.profile_steps = profile_steps
        self.step_mw = step_mw
        self.file = file
        self.profiles = tuple(profiles)
        self.limits_mw: list[int] = []
        self._selector = ZeusCost(eta_knob=0.5) if selector is None else selector
        self._profiles: list[Profile] = []

    def read_profile(self) -> bool:
        """Reads the saved measurements of an earlier run, for the next search. Returns whether
        there are any.
        """
        self._profiles = []
        paths = [] if self.file is None else [self.file.path, self.file.partial]
        for path in paths:
            if self.file is None or not path.exists():
                continue
            try:
                self._profiles.append(self.file.load(path))
            except ProfileError as error:
                warn(f"{error}. It is measured again and replaced.")
        return bool(self._profiles)

    def read_for_rank(self) -> bool:
        """Reads it in the process of rank 0."""
        return framework.rank() == 0 and self.read_profile()

    def begin(self, participants: Participants) -> Search:
        """Creates the search for these GPUs, with what is known about them."""
        self.limits_mw = scan(participants.min_mw, participants.max_mw, self.step_mw)
        loaded = self._fitting(participants)
        if loaded is None:
            return self._make(self.limits_mw, participants)
        samples = [
            one
            for one in loaded.as_samples(self.profile_steps)
            if one.profile is None or one.profile in participants.profiles
        ]
        same = loaded.selector in (None, _describe(self._for(participants)))
        if not same or (loaded.power_profiles or []) != _names(participants):
            # Its steps were spent with another selector.
            search = self._make(self.limits_mw, participants)
            search.resume(
                [replace(one, position=one.position - loaded.position) for one in samples]
            )
            return search
        measured = {round(row.power_limit * 1000) for row in loaded.measurements}
        search = self._make(sorted(measured.union(self.limits_mw), reverse=True), participants)
        search.resume(samples, loaded.position)
        if loaded.complete:
            search.settle()
        return search

    def _fitting(self, participants: Participants) -> Profile | None:
        """Returns the first saved profile that fits these GPUs."""
        profiles, self._profiles = (
            self._profiles,
            [],
        )  # do not read again what is being measured again
        for one in profiles:
            reason = one.check(participants.gpus, participants.min_mw, participants.max_mw)
            if reason is None:
                return one
            path = None if self.file is None else self.file.path
            warn(f"{path} {reason}. It is measured again and replaced.")
        return None

    def choose(self, estimates: list[LimitEstimate], participants: Participants) -> LimitEstimate:
        """Returns the best candidate.

        Raises:
            ValueError: The selector fails, or chooses a limit that was not measured.
        """
        cautious = self.name == "adaptive"
        return best(self._for(participants), estimates, self.profile_steps, cautious=cautious)

    @property
    def expected_steps(self) -> int:
        """The maximum number of steps of a search."""
        limits = len(self.limits_mw)
        one = expected_steps(self.name, limits, self.warmup_steps, self.profile_steps)
        if not self.profiles:
            return one
        if self.name == "exhaustive":
            return one * (1 + len(self.profiles))
        return 2 * one + len(self.profiles) * (self.warmup_steps + self._brief_steps)

    @property
    def _brief_steps(self) -> int:
        """Steps in which the adaptive search measures a profile at the highest limit."""
        return 2 * piece(self.profile_steps)

    def save(
        self, search: Search, participants: Participants, position: int, complete: bool
    ) -> None:
        """Saves the measurements. A failure causes a warning."""
        estimates = search.estimates(position)
        if self.file is None or not estimates:
            return
        found = Profile(
            measurements=measurements(estimates, self.profile_steps),
            gpus=participants.gpus,
            range=(participants.min_mw / 1000, participants.max_mw / 1000),
            selector=_describe(self._for(participants)),
            power_profiles=_names(participants) or None,
            complete=complete,
            position=position,
            samples=[SampleRow.of(sample) for sample in search.samples],
        )
        try:
            self.file.keep(found)
        except OSError as error:
            warn(f"The power limit profile could not be written to {self.file.path}: {error}.")

    def _for(self, participants: Participants) -> OptimumSelector:
        selector = self._selector
        return selector.of(len(participants.gpus)) if isinstance(selector, ZeusCost) else selector

    def _make(self, limits_mw: Sequence[int], participants: Participants) -> Search:
        if not participants.profiles:
            return self._of_limits(limits_mw, participants, list)
        return WithProfiles(
            limits_mw,
            participants.profiles,
            self.warmup_steps,
            self.profile_steps,
            lambda reference: self._of_limits(limits_mw, participants, reference),
            lambda estimates: self.choose(list(estimates), participants),
            self._brief_steps if self.name == "adaptive" else None,
        )

    def _of_limits(
        self, limits_mw: Sequence[int], participants: Participants, reference: Reference
    ) -> Search:
        """Creates the search of limits under one profile, or under none."""
        if self.name == "exhaustive":
            return Exhaustive(limits_mw, self.warmup_steps, self.profile_steps)
        selector = self._for(participants)

        def choice(estimates: Sequence[LimitEstimate], cautious: bool) -> int:
            candidates = [*reference(), *estimates]
            return choose(selector, candidates, self.profile_steps, cautious=cautious)

        search = Adaptive(
            limits_mw,
            self.warmup_steps,
            self.profile_steps,
            lambda curve: costs_of(selector, search.limits_mw, curve, reference()),
            choice,
            len(participants.gpus),
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
    curve: LimitCurve,
    reference: Sequence[LimitEstimate] = (),
) -> list[float] | None:
    """Returns the selector's costs of a curve; None if there are none, or it fails, as a user's
    may.
    """
    candidates = [(one.power_limit_mw, one.energy_j, one.time_s) for one in reference]
    candidates += zip(limits_mw, curve.energy_j, curve.time_s, strict=True)
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


def _names(participants: Participants) -> list[str]:
    return [profile_name(one) for one in participants.profiles]


def _describe(selector: OptimumSelector) -> str:
    """Returns its name and arguments, to tell whether a profile was made for the same criterion."""
    arguments = ", ".join(
        f"{name}={value!r}"
        for name, value in sorted(vars(selector).items())
        if not name.startswith("_") and isinstance(value, (bool, int, float, str))
    )
    return f"{type(selector).__name__}({arguments})"
