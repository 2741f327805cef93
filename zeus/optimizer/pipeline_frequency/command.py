"""The command that plans: `python -m zeus.optimizer.pipeline_frequency`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.placed_schedules import (
    BY_NAME,
    make_schedule,
    read_schedule,
)
from zeus.optimizer.pipeline_frequency.plans import Frontier
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile
from zeus.optimizer.pipeline_frequency.schedules import Pipeline, whole_iteration
from zeus.utils.progress import progress_bar
from zeus_common.options import FOLDER, NUMBER, WHOLE
from zeus_common.text import percent
from zeus_ipc import __version__
from zeus_ipc.parsing import parse, read_file

if TYPE_CHECKING:
    from zeus.optimizer.pipeline_frequency.planner import Planner

DEFAULT_P2P_POWER_W = 70.0


class _Watts(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # since click 8.3
    """A number, or the file that profile_p2p.py wrote."""

    name = "W|FILE"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return float(value)
        except ValueError:
            pass
        try:
            return float(parse(read_file(value))["power_w"])
        except (OSError, ValueError, KeyError, TypeError):
            self.fail(f"{value} is neither watts nor a file that profile_p2p.py wrote", param, ctx)


def _both(name: str) -> tuple[str, str]:
    """An option with dashes or underscores."""
    return f"--{name}", f"--{name.replace('-', '_')}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zeus.optimizer.pipeline_frequency")
@click.option(
    *_both("inst-profile"),
    required=True,
    metavar="CSV",
    help="Profile, as CSV: stage,instruction,frequency,time,energy.",
)
@click.option(
    *_both("output-dir"),
    required=True,
    type=FOLDER,
    help="A new folder for the plans.",
)
@click.option(*_both("num-mbs"), type=WHOLE, help="Number of microbatches per iteration.")
@click.option(*_both("num-stages"), type=WHOLE, help="Number of stages.")
@click.option(
    *_both("p2p-power"),
    type=_Watts(),
    default=DEFAULT_P2P_POWER_W,
    show_default=True,
    help="Power of a GPU blocked on communication: W, or profile_p2p.py's file.",
)
@click.option(
    "--schedule",
    default="1f1b",
    show_default=True,
    metavar="NAME|FILE",
    help=f"{', '.join(BY_NAME)}; or a file: your own as JSON, or torch's action table as CSV.",
)
@click.option(
    *_both("num-chunks"),
    type=WHOLE,
    default=2,
    show_default=True,
    help="Model chunks per stage, for looped schedules.",
)
@click.option(
    "--after",
    help="Instructions of each stage at the end of an iteration: all_reduce,optimizer_step.",
)
@click.option("--before", help="Instructions of each stage at its beginning: load.")
@click.option("--stages", help="Plan only for these stages of the profile, such as 0,1,2,7.")
@click.option(
    *_both("gpus-per-stage"),
    type=WHOLE,
    help="GPUs per stage.  [default: from the profile's tp_rank column]",
)
@click.option(
    *_both("energy-per"),
    type=click.Choice(["gpu", "stage"]),
    default="gpu",
    show_default=True,
    help="What the profile's energies are of: one GPU, or a whole stage.",
)
@click.option("--points", type=WHOLE, help="Maximum number of plans on the frontier.")
@click.option("--deadline", type=NUMBER, help="Make one plan: least energy within this time, s.")
@click.option(
    *_both("max-slowdown"),
    type=NUMBER,
    help="Make one plan: least energy within this multiple of the fastest time.",
)
@click.option(
    "--straggler", type=NUMBER, help="Make one plan, for a straggler that takes this time, s."
)
@click.option(
    *_both("max-power"),
    type=NUMBER,
    metavar="W",
    help="Make one plan with the power of all GPUs below this; the fastest unless a time is given.",
)
@click.option(
    *_both("max-ramp"),
    type=NUMBER,
    metavar="W/s",
    help="Make one plan with the ramp of their power below this.",
)
@click.option(
    *_both("ramp-window"),
    type=NUMBER,
    default=1.0,
    show_default=True,
    metavar="S",
    help="For --max-ramp: compare the means of consecutive intervals of this length, s.",
)
@click.option(*_both("change-time"), type=NUMBER, default=0.0, help="Time of a clock change, s.")
@click.option(
    *_both("max-changes"), type=WHOLE, help="Maximum number of clock changes per iteration."
)
@click.option("--exact/--no-exact", default=None, help="Prove plans best; slow unless small.")
@click.option(
    *_both("plot-interval"), type=WHOLE, default=100, show_default=True, help="Draw plots; 0: none."
)
@click.option(*_both("unit-time"), type=NUMBER, hidden=True)
@click.option(*_both("noise-factor"), type=NUMBER, hidden=True)
def main(**options: Any) -> None:
    """Plan the clock of every instruction of pipeline-parallel training.

    Writes freqs_pipeline_00000.py (the slowest plan) and so on, frontier.json and frontier.csv,
    pictures, and job.log.
    """
    try:
        _run(SimpleNamespace(**options))
    except PipelineFrequencyError as error:
        raise click.ClickException(error.message) from None


def _run(given: SimpleNamespace) -> None:
    names = ("points", "deadline", "max_slowdown", "straggler")
    asked = {name: vars(given)[name] for name in names if vars(given)[name] is not None}
    if len(asked) > 1:
        raise PipelineFrequencyError(
            f"give one of --{', --'.join(name.replace('_', '-') for name in asked)}: each asks "
            "for different plans"
        )
    bounded = given.max_power is not None or given.max_ramp is not None
    if bounded and set(asked) & {"points", "straggler"}:
        raise PipelineFrequencyError(
            "a bound on power asks for one plan: give it alone for the fastest, or with "
            "--deadline or --max-slowdown"
        )
    if given.unit_time is not None or given.noise_factor is not None:
        click.echo(
            "note: --unit-time and --noise-factor have no effect: no time is rounded", err=True
        )
    profile = InstructionProfile.read(given.inst_profile)
    if given.stages is not None:
        profile = profile.pick(_numbers(given.stages))
    gpus = profile.tensor_parallel if given.gpus_per_stage is None else given.gpus_per_stage
    pipeline = _pipeline(given.schedule, given.num_stages, given.num_mbs, given.num_chunks)
    if given.after or given.before:
        pipeline = whole_iteration(pipeline, _names(given.after), _names(given.before))
    unused = set(profile.names) - {one.name for one in pipeline.instructions}
    if unused:
        click.echo(
            f"note: the schedule has no {', '.join(sorted(unused))}, which the profile has",
            err=True,
        )
    # Imported only now, because it takes longer than all checks of the arguments.
    from zeus.optimizer.pipeline_frequency.planner import Changes, Planner, PowerBound

    peak_w, ramp = (math.inf if one is None else one for one in (given.max_power, given.max_ramp))
    bound = PowerBound(peak_w, ramp, given.ramp_window)
    with _new_folder(given.output_dir):
        planner = Planner(
            profile,
            pipeline,
            p2p_power_w=given.p2p_power,
            gpus_per_stage=gpus,
            energy_per=given.energy_per,
            changes=Changes(given.change_time, given.max_changes),
            exact=given.exact,
        )
        if bounded:
            deadline_s = given.deadline
            if given.max_slowdown is not None:
                deadline_s = given.max_slowdown * planner.fastest_time_s
            frontier = planner.bounded([bound], deadline_s)
        elif asked and given.points is None:
            ((question, value),) = asked.items()
            frontier = getattr(planner, question)(value)
        else:
            with progress_bar("planning") as tell:
                frontier = planner.frontier(given.points, tell)
        frontier.write(given.output_dir)
        text = summary(frontier, planner.fastest_time_s)
        (given.output_dir / "job.log").write_text(f"{text}\n", encoding="utf-8")
        click.echo(text)
        if given.plot_interval > 0:
            _plot(profile, planner, frontier, given.output_dir, given.plot_interval)
        click.echo(f"Plans are in {given.output_dir}; index 0 is the slowest.")


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[None]:
    """Creates the folder before the work, and deletes it if that leaves nothing in it."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise PipelineFrequencyError(f"{path} exists already; give a new folder") from None
    except OSError as error:
        raise PipelineFrequencyError(f"{path} cannot be created: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()


def summary(frontier: Frontier, fastest_time_s: float) -> str:
    """A summary in a few lines."""
    plans = frontier.plans
    chosen = sorted({0, frontier.by_deadline(float("inf")), len(plans) // 2, len(plans) - 1})
    lines = [
        f"{frontier.schedule}: {frontier.num_stages} stages, {frontier.num_microbatches} "
        f"microbatches, {frontier.p2p_power_w:g} W while blocked",
        f"highest clocks: {frontier.baseline_time_s:.4f} s, {frontier.baseline_energy_j:.1f} J",
        f"{'plan':>5} {'time (s)':>10} {'slower':>8} {'energy (J)':>12} {'saved':>8} "
        f"{'above bound':>12} {'changes':>8} {'peak (W)':>9}",
    ]
    for index in chosen:
        plan = plans[index]
        lines.append(
            f"{index:>5} {plan.time_s:>10.4f} "
            f"{percent(plan.time_s / fastest_time_s - 1, '.2'):>8} {plan.energy_j:>12.1f} "
            f"{percent(1 - plan.energy_j / frontier.baseline_energy_j, '.2'):>8} "
            f"{percent(plan.gap, '.3'):>12} {plan.clock_changes:>8} {plan.peak_power_w:>9.0f}"
        )
    if frontier.policies:
        lines.append("saved at the same iteration time by simpler policies:")
        names = "".join(f"{name:>17}" for name in frontier.policies)
        lines.append(f"{'plan':>5} {'this plan':>10}{names}")
    for index in chosen if frontier.policies else ():
        energies_j = [plans[index].energy_j, *frontier.beside(plans[index]).values()]
        saved = (1 - one / frontier.baseline_energy_j for one in energies_j)
        first, *others = (round(one, 6) + 0.0 for one in saved)  # -0.0 becomes 0.0
        cells = ("-" if math.isnan(one) else percent(one, ".2") for one in others)
        row = "".join(f"{cell:>17}" for cell in cells)
        lines.append(f"{index:>5} {percent(first, '.2'):>10}{row}")
    gaps = [plan.gap for plan in plans]
    lines.append(
        f"{len(plans)} plan{'s' * (len(plans) > 1)}; above the lower bound by "
        f"{percent(sum(gaps) / len(gaps), '.3')} on average, {percent(max(gaps), '.3')} at most"
    )
    return "\n".join(lines)


def _pipeline(
    schedule: str, num_stages: int | None, num_mbs: int | None, num_chunks: int
) -> Pipeline:
    if schedule not in BY_NAME:
        return read_schedule(schedule)
    if num_stages is None or num_mbs is None:
        raise PipelineFrequencyError(
            f"the schedule {schedule} needs --num-stages and --num-mbs, the microbatches"
        )
    return make_schedule(schedule, num_stages, num_mbs, num_chunks)


def _names(text: str | None) -> list[str]:
    return [part.strip().lower() for part in (text or "").split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PipelineFrequencyError(
            f"--stages must be stages' numbers such as 0,1,2,7, not {text!r}"
        ) from None


def _plot(
    profile: InstructionProfile,
    planner: Planner,
    frontier: Frontier,
    folder: Path,
    interval: int,
) -> None:
    from zeus.optimizer.pipeline_frequency import plots

    try:
        plots.plot_profile(profile, folder / "profile")
        if len(frontier.plans) > 1:
            plots.plot_frontier(frontier, folder / "frontier")
        last = len(frontier.plans) - 1
        for index in sorted({*range(0, last + 1, interval), last}):
            target = folder / f"pipeline_{index:05d}"
            plots.plot_timeline(planner, frontier, index, target)
    except PipelineFrequencyError as error:
        click.echo(f"note: {error.message}", err=True)
