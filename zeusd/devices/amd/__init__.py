"""AMD Instinct GPUs, through libamd_smi and sysfs.

Uses the standard library only, because the helper uses it too.
"""
