"""Groups to simulate, tables and pictures: `python -m zeus.simulate --help`."""

from zeus.simulate.command import main

main(prog_name="python -m zeus.simulate")
