"""Who may change what, and what is restored when: pure logic without I/O, threads or a clock."""
