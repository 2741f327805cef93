"""Energy of inference servers: `python -m zeus.serving --help`."""

from zeus.serving.command import main

main(prog_name="python -m zeus.serving")
