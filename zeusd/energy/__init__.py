"""Energy at any instant, from sensors that tick: pure, without clock, thread or driver."""
