"""Find what is slow: predict times from the work, compare them with the observed, and say where it is.

- `work` and `predictor`: the time of a micro-batch from its tokens and the squares of its documents' lengths;
- `pipeline`: the time of an iteration under a pipeline's schedule;
- `alarm`: the rules that raise an alarm, with what each cannot see;
- `localise`: rank, stage, link, replica or job, and whom to ask for a micro-benchmark;
- `damping`: slowdowns of a moment make the next one wait until it has lasted;
- `detector`: the detectors of a unit, of a pipeline and of a job.

Pure: values in, values out. The caller brings the times; equal arguments give equal results.
"""
