"""Find slow ranks, stages, links and replicas: compare observed times with those predicted from the work.

- `work`: the tokens of a micro-batch, and the squares of its documents' lengths;
- `alarm`: the rules that raise an alarm, and the slowdowns that each rule cannot see;
- `localise`: which rank, stage, link or replica is slow;
- `detector`: the time of a micro-batch from its work, and detectors for one unit and one job;
- `rank_detector`: the rank, stage or link that makes a replica of several ranks slow;
- `link_detector`: the slow link between replicas.

Pure: values in, values out. The caller brings the times; equal arguments give equal results.
"""
