"""What operators use: the command line `zeusctl` and the exporter. Plain clients of the socket."""
