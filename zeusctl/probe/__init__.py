"""A read-only probe of a node's GPUs: how their sensors and driver calls really behave. It needs
only the vendor's binding, and never sets anything. What its readings say is found by
`zeusd.energy.probed`.
"""
