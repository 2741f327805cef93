"""What a probe of GPUs finds out, from readings of their sensors: update period, visible window,
counter beside power. A report of it teaches the simulator. All modules are pure.
"""
