"""The door: accepts connections, speaks ZMTP, knows who the peer is, and is fair to every user."""
