"""Models of failure policies: what a job gains from each policy, and which policy to run.

- `closed_forms`: the published formulas, each with its source;
- `failures`: when units fail and how long their repair takes;
- `engine` and `policies`: one simulator for every policy, step by step;
- `pipelines`, `pipeline_policies` and `pipeline_runs`: pipeline-parallel replicas whose devices fail;
- `advice`: the comparison of policies for one cluster, and a recommendation;
- `published` and `published_pipelines`: every published figure beside ours;
- `report`: the comparison as an HTML page.

Everything is seeded: equal arguments give equal results. Times are in seconds.
"""
