"""Recovery records, and the ledger of a job's time."""
