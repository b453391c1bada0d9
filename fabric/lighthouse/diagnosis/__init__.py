"""Sentences for people: why a job waits, and why a rank failed or did not answer."""
