"""The driver of a job in a Ray cluster: ``ray_driver.py ADDRESS function``, ``... command`` or ``... nodes``.

With ``nodes`` two replicas have two nodes of one rank each. Each replica or rank notes its process and its
node's address in TEST_NOTES. The journals are in TEST_JOURNALS.
"""

import importlib
import os
import sys
from pathlib import Path

import ray

from fabric.integrations.ray import run

HERE = Path(__file__).parent


def train(rank: str = "", trainer: str = "tiny_trainer") -> str:
    replica, address = os.environ["FABRIC_REPLICA"], os.environ["FABRIC_BIND"]
    with Path(os.environ["TEST_NOTES"]).open("a") as notes:
        notes.write(f"{replica}{rank} {os.getpid()} {address}\n")
    os.environ["FABRIC_JOURNAL"] = f"{os.environ['TEST_JOURNALS']}/{replica}.jsonl"
    importlib.import_module(trainer).main()
    return replica


def main() -> None:
    address, work = sys.argv[1:]
    variables = {k: v for k, v in os.environ.items() if k.startswith(("TEST_", "TINY_"))}
    variables["PYTHONPATH"] = str(HERE)
    ray.init(address=address, _node_ip_address=address.partition(":")[0], runtime_env={"env_vars": variables})
    words = [str(HERE / "ray_driver.py"), "rank" if work == "nodes" else "replica"]
    replicas, nodes = (2, 2) if work == "nodes" else (3, 1)
    results = run(train if work == "function" else words, replicas=replicas, nodes=nodes)
    print("results", *results, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1:] == ["replica"]:
        train()
    elif sys.argv[1:] == ["rank"]:
        os.environ |= {"LAUNCHED_NOTES": os.devnull, "GLOO_SOCKET_IFNAME": "lo"}
        train(f".{os.environ['RANK']}", "launched_trainer")
    else:
        main()
