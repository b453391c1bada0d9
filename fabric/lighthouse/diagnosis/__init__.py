"""Words for people: what a job waits for, and what kept it waiting when something failed."""
