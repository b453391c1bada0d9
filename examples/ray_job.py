"""A job in a Ray cluster: Ray starts the replicas of own_loop.py, also again. docs/adopt/ray.md."""

import own_loop

from fabric.integrations.ray import run

if __name__ == "__main__":
    run(own_loop.main, replicas=3, resources={"CPU": 1})
