"""A Ray cluster of two nodes on loopback, which ends with this script's standard input.

It prints a JSON object with the cluster's address and the id of the second node. A line on standard input
kills the second node's raylet with SIGKILL.
The class Cluster of Ray catches signals of its process, so it has a process of its own.
"""

import json
import sys

from ray.cluster_utils import Cluster

# A raylet that is gone is missed after five seconds; one that is slow has ten for each answer.
MISSED = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 10,
}
ADDRESSES = ("127.0.0.2", "127.0.0.3")
NODE = {"include_dashboard": False, "object_store_memory": 80 << 20}


def main() -> None:
    head = {**NODE, "num_cpus": 4, "node_ip_address": ADDRESSES[0], "_system_config": MISSED}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        far = cluster.add_node(**NODE, num_cpus=1, node_ip_address=ADDRESSES[1])
        print(json.dumps({"address": cluster.address, "node": far.node_id}), flush=True)
        if sys.stdin.readline():
            raylet = far.all_processes["raylet"][0].process
            raylet.kill()
            raylet.wait()  # its actors take a zombie for a raylet that lives
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
