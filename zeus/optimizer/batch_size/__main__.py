"""The command without its name: `python -m zeus.optimizer.batch_size --help`."""

from zeus.optimizer.batch_size.command import main

main(prog_name="bso")
