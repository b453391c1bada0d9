"""Models of failure policies: what a job gains from each policy, and which policy to run.

- `closed_forms`: the published formulas, each with its source;
- `failures`: when units fail and how long their repair takes;
- `engine` and `policies`: one simulator for every policy, step by step;
- `advice`: the comparison of policies for one cluster, and a recommendation;
- `report`: the comparison as an HTML page.

Everything is seeded: equal arguments give equal results. Times are in seconds.
"""
