"""The operator's tools: the command line `zeusctl` and the exporter. Plain clients of the
socket.
"""
