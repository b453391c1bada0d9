"""Models of failure policies: what a job gains from each policy, and which policy to run.

- `closed_forms`: the published formulas, each with its source;
- `failures`: when units fail and how long their repair takes;
- `engine`: one simulator for every policy, step by step;
- `advice`: the policies, their comparison for one cluster, and a recommendation;
- `report`: the comparison as an HTML page.

Everything is seeded: equal arguments give equal results. Times are in seconds.
"""
