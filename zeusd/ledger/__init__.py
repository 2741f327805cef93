"""Who used how much energy, for months: one SQLite file, one writer."""
