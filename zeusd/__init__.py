"""The node daemon. It alone calls NVML's setters; everything else asks it over a Unix socket."""
