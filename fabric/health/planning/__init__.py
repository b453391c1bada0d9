"""Plan what to do about a slow or shrunken replica: the remedies, cheapest first.

- `partition`: micro-batches, layers and ranks in proportion to measured speeds;
- `layout`: what one replica can compute in one layout of its ranks, and its best layout;
- `remedies`: the remedies for a job, each with its gain, cost and reason, and the plan that follows.

Pure: values in, values out.
"""
