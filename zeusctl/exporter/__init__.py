"""`zeusd-exporter`: what Prometheus asks, answered from the socket. Root's daemon opens no port."""
