"""`PipelineFrequencyOptimizer`: one rank of a pipeline runs each instruction at its plan's clock.

The training thread follows the plan (`follower`) and sends clocks without waiting
(`frequency_controller`). Another thread communicates with the server (`connection`); new plans
start between two iterations. With `profile`, the rank first measures its instructions at each clock
(`online_profiler`), and the server plans from the measurements of all ranks.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from zeus import _node
from zeus.callback import Callback
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import JobInfo, RankInfo, RankProfile
from zeus.optimizer.pipeline_frequency.connection import ServerConnection
from zeus.optimizer.pipeline_frequency.follower import FREE, Follower, Schedule
from zeus.optimizer.pipeline_frequency.frequency_controller import FrequencyController
from zeus.optimizer.pipeline_frequency.iteration_times import IterationTimes, cuda_in_use
from zeus.optimizer.pipeline_frequency.online_profiler import (
    OnlineProfiler,
    ProfilerSettings,
    known_blocking_w,
)
from zeus.optimizer.pipeline_frequency.power_profiles import PowerProfiles
from zeus.optimizer.pipeline_frequency.profile import Setting, write_profile
from zeus.utils import framework
from zeus.utils.configured import OfProcess
from zeus.utils.guard import guarded
from zeus_common.text import sentence

log = logging.getLogger(__name__)

_numbers = itertools.count()


class PipelineFrequencyOptimizer(OfProcess, Callback):
    """Sets the clock of this process's GPU for each instruction of a pipeline.

    Call `on_step_begin` and `on_step_end` around each training step, and `on_instruction_begin` and
    `on_instruction_end` around each forward and backward of a microbatch. Announce evaluations with
    `with optimizer.paused():`. After the constructor, no failure ends training: one warning reports
    it, and the GPU runs at its default clocks.

    Args:
        rank: Number of this process in the job.
        dp_rank: Its pipeline.
        pp_rank: Its stage.
        tp_rank: Its number among the processes that share the stage.
        device_id: Its GPU, numbered as in torch.
        dp_degree: Number of pipelines.
        pp_degree: Number of stages of a pipeline.
        tp_degree: Number of processes that share a stage.
        world_size: Number of processes of the job, the product of the three.
        server_url: URL of the server, such as `http://master:7787`.
        job_metadata: A description of the job.
        schedule: Order of instructions, such as `1f1b`, if the server plans.
        num_microbatches: Microbatches of an iteration, if the server plans.
        profile: First measure instructions at each clock: True, or settings.
        wait_s: How long the constructor waits for the first plan, s. Without a plan, training
            begins at default clocks.
        apply: Called with the name of a setting that is not a clock, in the training thread, before
            each instruction whose setting differs from the last one's. None: names of workload
            power profiles that the GPU offers are requested through zeusd, instead of a clock.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: The ranks and degrees do not match, or another argument is wrong.
        ImportError: httpx is not installed.
    """

    def __init__(
        self,
        rank: int,
        dp_rank: int,
        pp_rank: int,
        tp_rank: int,
        device_id: int,
        dp_degree: int,
        pp_degree: int,
        tp_degree: int,
        world_size: int,
        server_url: str,
        job_metadata: str | None = None,
        *,
        schedule: str | None = None,
        num_microbatches: int | None = None,
        profile: bool | ProfilerSettings = False,
        wait_s: float = 10.0,
        apply: Callable[[str], None] | None = None,
    ) -> None:
        if not server_url.startswith(("http://", "https://")):
            raise PipelineFrequencyError(
                f"server_url must be such as http://master:7787, not {server_url!r}"
            )
        try:
            job = JobInfo(
                pp_degree=pp_degree,
                dp_degree=dp_degree,
                tp_degree=tp_degree,
                world_size=world_size,
                job_metadata=job_metadata,
                schedule=schedule,
                num_microbatches=num_microbatches,
            )
        except ValidationError as error:
            raise PipelineFrequencyError(sentence(error)) from None
        job.check(rank=rank, dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank)
        if not framework.initialized():
            raise RuntimeError(
                "PipelineFrequencyOptimizer needs torch.distributed: call "
                "torch.distributed.init_process_group first"
            )
        try:
            import httpx  # noqa: F401 - is it there?
        except ImportError:
            raise ImportError(
                "PipelineFrequencyOptimizer needs httpx; install it with pip install 'zeusd[pfo]'"
            ) from None
        self._place = RankInfo(
            rank=rank, dp_rank=dp_rank, pp_rank=pp_rank, tp_rank=tp_rank, available_frequencies=[]
        )
        self._profiles = PowerProfiles(device_id)
        self._apply = apply
        self._applied: str | None = None
        self._world_size = world_size
        self._device_id = device_id
        self._pid = os.getpid()
        self._closed = False
        self.clock_ns: Callable[[], int] = time.monotonic_ns
        """Tells when instructions begin and end, ns."""
        self._settings: ProfilerSettings | None = None
        if profile:
            self._settings = (
                profile if isinstance(profile, ProfilerSettings) else ProfilerSettings()
            )
        self._profiler: OnlineProfiler | None = None
        self.follower = Follower(lambda sentence: log.warning("%s", sentence))
        self._times = IterationTimes()
        self._count = 0  # instructions of the last complete step
        self._controller = FrequencyController(device_id)
        self._link: ServerConnection | None = None
        notes = framework.notes(f"zeus/pipeline_frequency/{next(_numbers)}")
        if notes is None:
            log.warning(
                "torch.distributed has no store that the ranks need to agree on a job, so "
                "training runs at default clocks; initialise it with env:// or a TCPStore"
            )
        else:
            self._link = ServerConnection(
                server_url,
                job,
                self._place,
                lambda: self._controller.supported,
                notes,
                self._take,
                lambda: (self.follower.iteration, self.follower.schedule.version),
            )
            self._link.start(0.0 if self._settings is not None else wait_s)

    # --------------------------------------------------------------------------------- properties

    @property
    def job_id(self) -> str:
        """The job's id on the server; empty until it is registered."""
        return "" if self._link is None else self._link.job_id

    @property
    def plan_version(self) -> int:
        """Version of the plan in force; 0: there is none."""
        return self.follower.schedule.version

    @property
    def iteration(self) -> int:
        """Training steps begun before the present one; -1 before the first."""
        return self.follower.iteration

    @property
    def profiling(self) -> bool:
        """Whether instructions are still being measured."""
        return self._settings is not None

    # -------------------------------------------------------------------------------- callbacks

    @guarded
    def on_step_begin(self) -> None:
        """A training step begins."""
        self._end_iteration()
        self.follower.begin_step()
        self._between_steps()

    @guarded
    def on_step_end(self) -> None:
        """A training step has ended."""
        self._end_iteration()
        self.follower.end_step()
        if self._profiler is not None:
            self._profiler.step_end()
        if not self.follower.explicit:
            self._between_steps()

    @guarded
    def on_pause(self) -> None:
        """Something other than training begins; it runs at default clocks."""
        self._end_iteration()
        self.follower.pause()
        if self._profiler is not None:
            self._profiler.pause()
        self._reset()

    def on_instruction_begin(self, name: str) -> None:
        """An instruction begins: sets its clock, without waiting.

        Args:
            name: `forward` or `backward`, as in the plan.
        """
        # No decorator, because this is called a hundred times a second.
        try:
            follower = self.follower
            if self._settings is not None:
                self._begin_profiled(name)
                return
            setting = follower.instruction(name)
            if isinstance(setting, str):
                self._apply_setting(setting)
            elif setting == FREE:
                self._reset()
            else:
                if setting and self._applied is not None and self._apply is None:
                    self._applied = None
                    self._profiles.want(None)
                self._controller.set_frequency(setting)
            if follower.count == 1:
                self._times.begin(follower.iteration)
            if self._times.timed and setting != FREE:
                self._times.begin_instruction(name, setting)
        except Exception as error:  # noqa: BLE001 - training must go on
            self._failed(error)

    def on_instruction_end(self, name: str) -> None:
        """An instruction has ended, or was launched."""
        try:
            if self._settings is not None and self._profiler is not None:
                self._profiler.instruction_end(name)
            if self._times.timed:
                self._times.end_instruction()
            follower = self.follower
            if follower.count and follower.count >= (follower.expected or self._count):
                self._times.end()
        except Exception as error:  # noqa: BLE001 - training must go on
            self._failed(error)

    def on_train_end(self) -> None:
        """Training has ended: restores the clocks."""
        self.close()

    def close(self) -> None:
        """Restores clocks and ends the threads. Never raises, and may be called again."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._settings = self._profiler = None
        self.follower = Follower(lambda sentence: None)
        self._controller.end()
        self._profiles.end()
        if self._link is not None:
            self._link.stop()

    # --------------------------------------------------------------------------------- internals

    def _take(self, schedule: Schedule) -> None:
        """Handles a new plan; called by the connection's thread."""
        settings = {setting for _, setting in schedule.steps}
        names = sorted(setting for setting in settings if isinstance(setting, str))
        unknown = names if self._apply is None else []
        if unknown:
            offered = self._profiles.offered
            unknown = [name for name in names if name not in offered]
        if unknown:
            log.warning(
                "the plan has settings that are neither clocks (%s) nor workload power profiles of "
                "this GPU, so training continues at default clocks; pass "
                "PipelineFrequencyOptimizer(apply=...), which sets them",
                ", ".join(unknown[:5]),
            )
            return
        self._controller.prepare({mhz for mhz in settings if isinstance(mhz, int)})
        self.follower.offer(schedule)
        log.info(
            "plan %d with %d instructions begins with iteration %d",
            schedule.version,
            len(schedule.steps),
            schedule.at_iteration,
        )

    def _between_steps(self) -> None:
        """A step begins."""
        self._controller.progress()
        _node.progress()
        if self._settings is not None:
            self._profile_step()
        link = self._link
        if link is not None:
            link.finished(*self._times.collect())

    def _end_iteration(self) -> None:
        follower = self.follower
        if follower.training and follower.count:
            if follower.count == (follower.expected or follower.count):
                self._times.close()
            self._count = follower.count

    def _apply_setting(self, name: str) -> None:
        if name == self._applied:
            return
        if self._apply is not None:
            self._apply(name)
        else:
            self._controller.reset()
            self._profiles.want(name)
        self._applied = name

    def _reset(self) -> None:
        """Restores default clocks and clears the profile."""
        self._controller.reset()
        if self._apply is None:
            self._profiles.want(None)
            self._applied = None

    def _failed(self, error: Exception) -> None:
        log.info("the pipeline frequency optimizer failed", exc_info=True)
        if not self._closed:
            log.warning(
                "the pipeline frequency optimizer failed (%s: %s); training continues at default "
                "clocks. Please report this",
                type(error).__name__,
                error,
            )
            self.close()

    # ---------------------------------------------------------------------------------- profiling

    def _begin_profiled(self, name: str) -> None:
        follower = self.follower
        follower.skip()
        if self._profiler is not None:
            self._profiler.instruction_begin(name)
        if follower.count == 1:
            self._times.begin(follower.iteration)

    def _profile_step(self) -> None:
        """Between two steps of the sweep."""
        if self._profiler is None:
            self._profiler = self._new_profiler()
            if self._profiler is None:
                return
        self._profiler.step_begin()
        if self._profiler.finished:
            self._end_profiling(self._profiler)

    def _new_profiler(self) -> OnlineProfiler | None:
        """Creates the sweep, once the GPU can be reached."""
        settings, clocks = self._settings, self._controller.supported
        if settings is None or not clocks:
            return None
        chosen = settings.chosen(clocks)
        self._controller.prepare(chosen)
        offered = self._profiles.offered
        missing = [name for name in settings.power_profiles if name not in offered]
        if missing:
            log.warning(
                "this GPU offers no workload power profile %s, which is not measured; it offers %s",
                missing[0],
                ", ".join(offered) or "none",
            )
        profiles = [name for name in settings.power_profiles if name in offered]
        return OnlineProfiler(
            [*chosen, *profiles],
            settings,
            self._controller.sensor(),
            self._hold,
            lambda: self._controller.working,
            settings.synchronize or self._synchronize,
            self.clock_ns,
            self._place.place,
        )

    def _hold(self, setting: Setting) -> bool:
        """Sets a clock or a profile, and waits until it is in force. Returns whether it is."""
        if isinstance(setting, str):
            self._controller.reset()
            return self._profiles.hold(setting)
        return self._profiles.hold(None) and self._controller.hold(setting)

    def _synchronize(self) -> None:
        if cuda_in_use() is not None:
            framework.synchronize("torch", [self._device_id])

    def _end_profiling(self, profiler: OnlineProfiler) -> None:
        """Ends the sweep: the server plans, and meanwhile the GPU runs at its default clocks."""
        settings, self._settings, self._profiler = self._settings, None, None
        self._reset()
        if profiler.failure or not profiler.rows or settings is None:
            log.warning(
                "the instructions could not be profiled (%s); training continues at default clocks",
                profiler.failure or "no clock was measured",
            )
            return
        self._write(profiler, settings)
        if self._link is not None:
            self._link.send_profile(
                RankProfile(
                    **self._place.numbers,
                    rows=profiler.rows,
                    p2p_power_w=self._blocking_w(profiler, settings),
                    instructions=profiler.instructions,
                )
            )

    def _blocking_w(self, profiler: OnlineProfiler, settings: ProfilerSettings) -> float | None:
        if settings.p2p_power_w is not None:
            return settings.p2p_power_w
        if profiler.blocking is not None:
            return profiler.blocking.watts
        known = known_blocking_w(self._controller.model)
        if known is None:
            log.warning(
                "the power of %s while it waits for another stage was not measured; measure it "
                "with profile_p2p.py and pass it as ProfilerSettings(p2p_power_w=...)",
                self._controller.model or "this GPU",
            )
        return known

    def _write(self, profiler: OnlineProfiler, settings: ProfilerSettings) -> None:
        if settings.csv_path is None:
            return
        path, place = Path(settings.csv_path), self._place
        if self._world_size > 1:
            path = path.with_name(f"{path.stem}-rank{place.rank}{path.suffix or '.csv'}")
        try:
            write_profile(profiler.rows, path)
        except OSError as error:
            log.warning("the profile cannot be written to %s (%s)", path, error.strerror or error)
