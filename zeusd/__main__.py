"""`python -m zeusd`."""

from zeusd.cli import main

main()
