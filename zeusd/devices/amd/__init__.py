"""AMD Instinct GPUs, through libamd_smi and sysfs.

Standard library only, as the helper uses it too.
"""
