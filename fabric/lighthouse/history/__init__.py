"""What failures cost a job: recovery records and the ledger of its time."""
