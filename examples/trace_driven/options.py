"""What the two scripts share: options, and what is done with the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from zeus.simulate.plots import FORMATS, draw
from zeus.simulate.results import write_rows
from zeus.simulate.study import Case, Study, run_study
from zeus.simulate.summary import tables
from zeus.simulate.workloads import GPUS
from zeus.utils.progress import progress_bar

DEFAULT_POLICY = "gp"


def parser(description: str) -> argparse.ArgumentParser:
    """With the options that both scripts take."""
    made = argparse.ArgumentParser(description=description)
    add = made.add_argument
    add("--gpu", choices=GPUS, default="v100", help="whose measured traces are used (v100)")
    add("--eta_knob", type=float, default=0.5, help="1 counts energy only, 0 time only (0.5)")
    add("--beta_knob", type=float, default=2.0, help="a run may cost so many times the best (2)")
    add(
        "--policy",
        action="append",
        help="what chooses batch sizes: gp, pruning-gts (the published one) or gts; may be "
        f"repeated, to compare them ({DEFAULT_POLICY})",
    )
    add("--window_size", type=int, default=0, help="runs that count of each batch size (all)")
    add("--summary_train", default="", help="CSV of training runs (one comes along)")
    add("--summary_power", default="", help="CSV of power by power limit (one comes along)")
    add("--processes", type=int, help="how many to use (one for each core)")
    add("--output", type=Path, help="all runs go here, as .csv or .parquet")
    add("--plot", type=Path, help=f"a picture goes here, as .{', .'.join(FORMATS)}")
    add("--verbose", action="store_true", help="print every run")
    return made


def simulate(options: argparse.Namespace, cases: Sequence[Case]) -> int:
    """Runs the cases, prints what came of them, and writes the files that were asked for.

    Returns:
        The exit code.
    """
    if options.plot is not None and options.plot.suffix.removeprefix(".") not in FORMATS:
        fail(f"--plot must end with .{', .'.join(FORMATS)}, not be {options.plot}")
    for path in filter(None, (options.output, options.plot)):
        if not path.parent.is_dir():
            fail(f"there is no folder {path.parent}")
    try:
        with progress_bar("simulating") as tell:
            study = run_study(cases, options.processes, tell)
        if options.verbose:
            tell_runs(study)
        if study.rows:
            print(tables(study.rows))
            if options.output is not None:
                write_rows(study.rows, options.output)
                print(f"All runs are in {options.output}.")
            if options.plot is not None:
                draw(study.rows, options.plot)
                print(f"The picture is {options.plot}.")
    except (ValueError, RuntimeError, ImportError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename} cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        return 130
    tell_failures(study, len(cases))
    return 1 if study.failures else 0


def tell_runs(study: Study) -> None:
    """Prints every run."""
    for row in study.rows:
        print(
            f"{row.policy}, {row.name}, seed {row.seed}, recurrence {row.recurrence}: "
            f"batch size {row.batch_size}, {row.power_limit} W, {row.energy:.2f} J, "
            f"{row.time:.2f} s, cost {row.cost:.2f} J"
            + ("" if row.reached else ", target not reached")
        )


def tell_failures(study: Study, cases: int) -> None:
    """Prints what could not be simulated, and why; each reason once."""
    found: dict[str, list[str]] = {}
    for case, why in study.failures:
        name = f"{case.policy} {case.name or f'seed {case.seed}'}"
        found.setdefault(why, []).append(name)
    for why, names in found.items():
        which = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        where = f"{len(names)} of {cases} jobs ({which}): " if cases > 1 else ""
        print(f"{script()}: {where}{why}", file=sys.stderr)


def fail(message: str) -> NoReturn:
    """Ends the program as argparse does for options that make no sense."""
    print(f"{script()}: {message}", file=sys.stderr)
    sys.exit(2)


def script() -> str:
    """Name of the program."""
    return Path(sys.argv[0]).name
