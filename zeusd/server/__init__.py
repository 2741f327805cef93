"""The server: accepts connections, speaks ZMTP, identifies peers, and shares time fairly among
users."""
