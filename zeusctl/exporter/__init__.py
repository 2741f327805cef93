"""`zeusd-exporter`: zeusd's metrics for Prometheus, read from the socket. zeusd itself opens no
port.
"""
