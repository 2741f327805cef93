"""Everything outside the core that does I/O: processes, files, devices, time."""
