"""Writes the measured profile of a pipeline, which a simulated node replays.

    python measured_profile.py --gpu a100 --num-stages 4 profile.csv

GPT-3 175B in eight stages, as published with the paper on Perseus (SOSP 2024). With fewer
stages, the last one is always included: it has the vocabulary, and takes longest. The figures are
those of a tenth of a stage; --scale 10 gives a whole one.
"""

from __future__ import annotations

import argparse
import csv
from importlib.resources import files
from pathlib import Path

from zeus_common.tables import rows

STAGES = 8


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("output", type=Path, help="CSV file")
    parser.add_argument("--gpu", choices=["a100", "a40"], default="a100", help="a100")
    parser.add_argument("--num-stages", type=int, choices=range(2, STAGES + 1), default=4, help="4")
    parser.add_argument("--scale", type=float, default=1.0, help="scale of times and energies (1)")
    options = parser.parse_args()
    if not 0 < options.scale <= 100:
        parser.error(f"--scale must be above 0 and at most 100, not {options.scale:g}")
    kept = [*range(options.num_stages - 1), STAGES - 1]
    data = files("zeusd.devices.simulated") / "data" / "perseus"
    header, *measurements = rows(str(data / f"gpt3-175b+{options.gpu}.columns.csv.xz"))
    with options.output.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(header)
        for stage, instruction, frequency, *measured in measurements:
            if int(stage) in kept:
                scaled = [f"{float(figure) * options.scale:.7g}" for figure in measured]
                table.writerow([kept.index(int(stage)), instruction, frequency, *scaled])


if __name__ == "__main__":
    main()
