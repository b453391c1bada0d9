"""Find what is slow: predict times from the work, compare them with the observed, and say where it is.

- `pipeline`: the time of an iteration under a pipeline's schedule.

Pure: values in, values out. The caller brings the times; equal arguments give equal results.
"""
