"""`python -m zeus_fleet` is `zeus-fleet`."""

from zeus_fleet.commands import main

if __name__ == "__main__":
    main(prog_name="python -m zeus_fleet")
