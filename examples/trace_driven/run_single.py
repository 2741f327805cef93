"""One recurring job, played through with measured training runs.

    python run_single.py --policy gp --policy pruning-gts --plot single.png

Each recurrence trains with the batch size that the policy chooses, until the target is reached.
"""

from __future__ import annotations

import sys

from options import DEFAULT_POLICY, parser, simulate

from zeus.job import Job
from zeus.simulate.study import Case


def main() -> int:
    assert __doc__ is not None
    arguments = parser(__doc__.partition("\n\n")[0])
    add = arguments.add_argument
    add("--dataset", default="librispeech", help="data set (librispeech)")
    add("--model", default="deepspeech2", help="network (deepspeech2)")
    add("--optimizer", default="adamw", help="optimizer (adamw)")
    add("--target_metric", type=float, default=40.0, help="what training is to reach (40)")
    add("--max_epochs", type=int, default=16, help="a run is given up after so many (16)")
    add("--b_0", type=int, default=192, help="batch size of the first run (192)")
    add("--seed", type=int, default=1, help="of the policy and of the drawn runs (1)")
    add("--seeds", type=int, default=1, help="so many simulations, from --seed on (1)")
    pairs = "times that the job recurs (twice the pairs of batch size and power limit)"
    add("--num_recurrence", type=int, help=pairs)
    options = arguments.parse_args()
    job = Job(
        dataset=options.dataset,
        network=options.model,
        optimizer=options.optimizer,
        target_metric=options.target_metric,
        max_epochs=options.max_epochs,
        default_bs=options.b_0,
    )
    cases = [
        Case(
            job=job,
            gpu=options.gpu,
            policy=policy,
            window_size=options.window_size,
            seed=seed,
            eta_knob=options.eta_knob,
            beta_knob=options.beta_knob,
            num_recurrence=options.num_recurrence,
            summary_train=options.summary_train,
            summary_power=options.summary_power,
        )
        for policy in options.policy or [DEFAULT_POLICY]
        for seed in range(options.seed, options.seed + options.seeds)
    ]
    return simulate(options, cases)


if __name__ == "__main__":
    sys.exit(main())
