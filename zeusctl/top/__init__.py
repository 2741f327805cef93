"""The live view: its data (`model`) and its screens (`app`, `screens`)."""
