"""A launcher's words to the other hosts of its replica, and this host's place among them."""

import os
import uuid
from collections.abc import Mapping
from dataclasses import replace

import fabric
from fabric.cli.launch.attempt import Place
from fabric.cli.launch.devices import device_kind
from fabric.cli.launch.lighthouse_words import NodeLink, WordsThread
from fabric.cli.launch.restart_policy import AttemptEnd
from fabric.model import counted
from fabric.protocol.nodes import NodeEnd, NodeOrder, NodeSays
from fabric.runtime.config import advertised_host, settings
from fabric.runtime.rank_layout import RankLayout


class OtherHosts:
    """This host's words to the other hosts of its replica, and their answers over ``link``."""

    def __init__(self, environment: Mapping[str, str], nodes: int, node: int, thread: WordsThread) -> None:
        chosen = settings({"FABRIC_REPLICA": "spare-node", **environment, "FABRIC_LAYOUT": ""})
        self._host = advertised_host(chosen)
        self.link = NodeLink(chosen, environment.get("FABRIC_REPLICA", ""), thread)
        kind, count, device_gb = device_kind(environment)
        self.says = NodeSays(
            uuid.uuid4().hex,
            self._host,
            node,
            nodes,
            "",
            "none",
            rack=chosen.rack,
            device=kind,
            devices=count,
            device_gb=device_gb,
            memory_gb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        )
        self.own_ranks = range(0)

    def wait_for_attempt(self, layout: RankLayout, port: int) -> None:
        """Say that this host waits for the next attempt; rank 0 would listen on ``port``."""
        count = layout.ranks // self.says.nodes
        shape = f"{self.says.nodes} nodes of {counted(count, 'rank')} ({layout}), fabric {fabric.__version__}"
        address = f"{self._host}:{port}"
        self.says = replace(self.says, shape=shape, address=address, run="", end=None)
        self.own_ranks = range(count)
        self.link.say(self.says)

    def take_place(self, order: NodeOrder) -> Place:
        """Obey an order to start, and return this host's place."""
        says = replace(
            self.says, run=order.run, attempt=order.attempt, node=order.node, instead=order.instead
        )
        first = order.node * len(self.own_ranks)
        self.says, self.own_ranks = says, range(first, first + len(self.own_ranks))
        self.link.say(says, order.replica)
        host, _, port = order.head.rpartition(":")
        return Place(order.node, says.nodes, host, int(port))

    def tell_end(self, end: AttemptEnd) -> None:
        """Say how this host's ranks ended."""
        self.says = replace(self.says, end=NodeEnd(dict(end.codes), end.first, end.ran_s))
        self.link.say(self.says)
