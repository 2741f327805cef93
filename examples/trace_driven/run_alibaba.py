"""A cluster's groups of recurring jobs, played through with measured training runs.

    python run_alibaba.py --policy gp --policy pruning-gts --plot cluster.png

Jobs of a group may begin while others of it still run. Without --groups the groups are made up; the
README says how to have those of Alibaba's cluster.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from itertools import islice
from pathlib import Path

from options import DEFAULT_POLICY, fail, parser, simulate

from zeus.simulate.groups import by_group, read_groups, synthetic_groups
from zeus.simulate.study import Case, workload_job


def main() -> int:
    assert __doc__ is not None
    arguments = parser(__doc__.partition("\n\n")[0])
    add = arguments.add_argument
    add("--groups", type=Path, help="CSV file of groups (they are made up)")
    add("--num_groups", type=int, help="only so many (60 are made up, all are read)")
    add("--num_jobs", type=int, help="only so many of each group (all)")
    options = arguments.parse_args()
    try:
        if options.groups is None:
            groups = by_group(synthetic_groups(options.num_groups or 60))
            print("The groups are made up; README.md says how to have Alibaba's.", file=sys.stderr)
        else:
            groups = read_groups(options.groups)
        traces = (options.gpu, options.summary_train, options.summary_power)
        cases = []
        for name, jobs in islice(groups.items(), options.num_groups):
            case = Case(
                job=workload_job(jobs[0].dataset, *traces),
                gpu=options.gpu,
                name=name,
                window_size=options.window_size,
                seed=zlib.adler32(name.encode()),
                eta_knob=options.eta_knob,
                beta_knob=options.beta_knob,
                group=tuple(jobs[: options.num_jobs]),
                summary_train=options.summary_train,
                summary_power=options.summary_power,
            )
            cases += [replace(case, policy=policy) for policy in options.policy or [DEFAULT_POLICY]]
    except OSError as error:
        fail(f"{error.filename} cannot be read: {error.strerror}")
    except (ValueError, ImportError) as error:
        fail(str(error))
    return simulate(options, cases)


if __name__ == "__main__":
    sys.exit(main())
