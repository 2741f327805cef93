"""Tests the controls of GPUs that nobody else uses: every value range, and restores after SIGKILL.

Everything is set through zeusd and under leases, so whatever ends an exercise, zeusd restores it.
"""
