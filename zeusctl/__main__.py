"""`python -m zeusctl`."""

from zeusctl.cli import main

main()
