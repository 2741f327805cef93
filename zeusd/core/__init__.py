"""Who may change what, and what goes back when: pure logic without I/O, threads or a clock."""
