"""Models of failure policies: what a job gains from which policy, and what to run.

- `closed_forms`: the published formulas, each with its source;
- `endurance`: how many failures a layout masks, exact or by Monte Carlo;
- `failures`: when units fail and how long their repair takes;
- `engine` and `policies`: one simulator for every policy, step by step;
- `pipelines`, `pipeline_policies` and `pipeline_runs`: replicas of pipelines whose devices die or get slow;
- `advice`: the comparison of policies for one cluster, and a recommendation;
- `published` and `published_pipelines`: every published figure beside ours;
- `report`: the same as a page.

Everything is seeded: equal arguments give equal results. Times are in seconds.
"""
