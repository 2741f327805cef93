"""Energy at any instant, from sensors that update periodically. Pure: no clock, thread or
driver."""
