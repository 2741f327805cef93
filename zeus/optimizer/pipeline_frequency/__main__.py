"""Plans clocks: `python -m zeus.optimizer.pipeline_frequency --help`."""

from zeus.optimizer.pipeline_frequency.command import main

main(prog_name="python -m zeus.optimizer.pipeline_frequency")
