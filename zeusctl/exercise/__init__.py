"""Exercises the controls of GPUs that are one's own: each through its range, and what kills leave.

Everything is set through zeusd and under leases, so whatever ends an exercise, zeusd restores it.
"""
