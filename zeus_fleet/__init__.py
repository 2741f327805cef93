"""A power budget for many nodes: the sum of all GPUs' power limits stays within it.

`zeus_fleet.node` and `zeus_fleet.allocator` decide, without I/O, threads or a clock.
`zeus_fleet.policies` divides the power among jobs. See docs/operate/fleet.md.
"""
