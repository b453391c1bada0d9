"""The driver of a job in a Ray cluster: ``ray_driver.py ADDRESS function``, or ``... command``.

Each replica notes its process and its node's address in TEST_NOTES. The journals are in TEST_JOURNALS.
"""

import os
import sys
from pathlib import Path

import ray

from fabric.integrations.ray import run

HERE = Path(__file__).parent


def train() -> str:
    replica, address = os.environ["FABRIC_REPLICA"], os.environ["FABRIC_BIND"]
    with Path(os.environ["TEST_NOTES"]).open("a") as notes:
        notes.write(f"{replica} {os.getpid()} {address}\n")
    os.environ["FABRIC_JOURNAL"] = f"{os.environ['TEST_JOURNALS']}/{replica}.jsonl"
    import tiny_trainer

    tiny_trainer.main()
    return replica


def main() -> None:
    address, work = sys.argv[1:]
    variables = {k: v for k, v in os.environ.items() if k.startswith(("TEST_", "TINY_"))}
    variables["PYTHONPATH"] = str(HERE)
    ray.init(address=address, _node_ip_address=address.partition(":")[0], runtime_env={"env_vars": variables})
    words = [str(HERE / "ray_driver.py"), "replica"]
    print("results", *run(train if work == "function" else words, replicas=3), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1:] == ["replica"]:
        train()
    else:
        main()
