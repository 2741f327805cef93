"""Everything around the core that touches the world: sockets, processes, files, devices, time."""
