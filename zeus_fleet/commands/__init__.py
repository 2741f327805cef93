"""The subcommands of `zeus-fleet`."""
