"""The rules: who may change what, and when what is restored. Pure logic without I/O, threads or a
clock."""
