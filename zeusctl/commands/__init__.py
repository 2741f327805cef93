"""The verbs of `zeusctl`, a module each. Each is a plain client of the socket."""
