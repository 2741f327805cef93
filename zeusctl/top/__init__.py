"""The live view: what it shows (`model`), and on what (`app`, `screens`)."""
