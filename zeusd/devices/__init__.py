"""NVML as zeusd sees it: one protocol (`api`), the real library (`real`), a simulation (`sim`)."""
