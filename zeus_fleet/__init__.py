"""A power budget over many nodes: the sum of all GPUs' power limits stays within it.

`zeus_fleet.node` and `zeus_fleet.allocator` decide, without I/O, threads or a clock of their own;
`zeus_fleet.policies` says who gets the watts. See docs/operate/fleet.md.
"""
