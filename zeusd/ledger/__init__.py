"""The energy ledger: months of energy by user, job and pod, in one SQLite file with one writer."""
