"""``run``: a job of fabric in a Ray cluster, with an actor per replica, or per node of it. docs/adopt/ray.md.

Ray places the actors, and starts an actor that died again, on another node if its node is gone. The process
of an actor is its replica's trainer, or the parent of `fabric launch`. The caller's process watches for nodes
that Ray drains, for instance because they are preempted.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray._private.state import state as cluster_state
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fabric.errors import ConfigError, FabricError, Unreachable
from fabric.exit_codes import FINAL_CODES, FINISHED, RESTART
from fabric.integrations.arguments import check_version
from fabric.runtime import config
from fabric.runtime.http.lighthouse_client import Lighthouses
from fabric.runtime.private_folder import make_private, open_private
from fabric.runtime.process_environment import add_to_environment, own_program, process_environment
from fabric.runtime.system_calls import die_with

LEAST, TESTED = "2.50", "2.60.0"
_LOOK_S = 1.0  # seconds from one look at Ray's nodes to the next

_log = logging.getLogger("fabric")


def run(
    work: Callable[[], Any] | Sequence[str],
    *,
    replicas: int | str,
    nodes: int = 1,
    resources: Mapping[str, float] | None = None,
    lighthouse: str = "",
    job: str = "",
    token_file: str | Path = "",
    strategy: str = "SPREAD",
) -> list[Any]:
    """Run a job in the Ray cluster to its end; return what ``work`` returned in each replica, or None.

    ``work`` is a function that trains with ``fabric.client``, or the words after `fabric launch`, such as
    ``["--ranks", "4", "train.py"]``. ``replicas`` is as FABRIC_REPLICAS. A replica has ``nodes`` actors, each
    with a launcher of its own. ``resources`` are those of one actor, such as ``{"CPU": 8, "GPU": 1}``;
    ``strategy`` is that of Ray's placement group. Without ``lighthouse``, the URLs of the lighthouses, the
    job has a lighthouse in a named actor on this node.

    The replicas get the FABRIC_* variables of this process. Raises ConfigError for what cannot be used, and
    FabricError if no replica has finished.
    """
    check_version("ray", LEAST, TESTED)
    if not callable(work) and (isinstance(work, str) or not work):
        raise ConfigError('the work is a function, or a list of words such as ["train.py", "--lr", "0.1"]')
    if callable(work) and nodes > 1:
        raise ConfigError("a replica of several nodes is started by `fabric launch`: give a list of words")
    given = {
        "FABRIC_JOB": job,
        "FABRIC_REPLICAS": str(replicas),
        "FABRIC_LIGHTHOUSE": lighthouse,
        "FABRIC_TOKEN_FILE": str(token_file),
    }
    environment = {k: v for k, v in process_environment().items() if k.startswith("FABRIC_")}
    environment |= {name: text for name, text in given.items() if text}
    chosen = config.settings(
        {"FABRIC_LIGHTHOUSE": "http://made-later", **environment, "FABRIC_REPLICA": "r0"}
    )
    if chosen.disable:
        raise ConfigError(
            "FABRIC_DISABLE is set, so each replica would train alone: call the function yourself"
        )
    token = chosen.token.decode()
    with contextlib.ExitStack() as stack:
        if "FABRIC_LIGHTHOUSE" not in environment:
            token = token or secrets.token_hex(16)
            environment["FABRIC_LIGHTHOUSE"] = stack.enter_context(_lighthouse(chosen.job, token))
        urls = tuple(environment["FABRIC_LIGHTHOUSE"].split(","))
        count = config.parse_replicas(chosen.replicas)[1]
        group = placement_group([dict(resources or {"CPU": 1})] * (count * nodes), strategy=strategy)
        stack.callback(remove_placement_group, group)
        actors = [_actor(i, nodes, group, environment, token) for i in range(count * nodes)]
        return _RayJob(work, nodes, actors, group, Lighthouses(urls, chosen.job, token, chosen.tls)).wait()


@dataclass(slots=True)
class _RayJob:
    """The actors of a job until they have ended; each replica has ``nodes`` of them in a row."""

    work: Callable[[], Any] | Sequence[str]
    nodes: int
    actors: list[Any]
    group: Any
    lighthouses: Lighthouses
    running: dict[Any, int] = field(default_factory=dict)  # the call of each actor that has not ended
    results: dict[int, Any] = field(default_factory=dict)  # what finished actors returned
    failures: dict[int, str] = field(default_factory=dict)
    asked: dict[int, str] = field(default_factory=dict)  # actor -> the node that it was last asked to leave
    drained: dict[int, str] = field(default_factory=dict)  # actor -> the node that it leaves
    followers: set[int] = field(default_factory=set)  # actors whose replica leaves another actor's node

    def wait(self) -> list[Any]:
        """Wait until all actors have ended, but for no actor without a node once another has finished."""
        for index in range(len(self.actors)):
            self._start(index)
        while self.running and not (self.results and self._are_lost()):
            ended, _ = ray.wait(list(self.running), num_returns=1, timeout=_LOOK_S)
            for call in ended:
                self._note_end(call, self.running.pop(call))
            self._drain()
        if not self.results:
            why = "; ".join(f"{self._replica(i)}: {failure}" for i, failure in sorted(self.failures.items()))
            raise FabricError(f"no replica of job {self.lighthouses.job} has finished: {why}")
        return [self.results.get(index) for index in range(0, len(self.actors), self.nodes)]

    def _replica(self, index: int) -> str:
        return f"r{index // self.nodes}"

    def _start(self, index: int) -> None:
        work = self.work
        if self.nodes > 1 and not callable(work):
            work = ["--nodes", str(self.nodes), "--node", str(index % self.nodes), *work]
        self.running[self.actors[index].train.remote(work)] = index

    def _note_end(self, call: Any, index: int) -> None:
        try:
            left, result = ray.get(call)
        except ray.exceptions.RayError as error:
            self.failures[index] = str(getattr(error, "cause", None) or error)
            _log.error("replica %s has failed: %s", self._replica(index), self.failures[index])
            return
        if index in self.followers:
            self.followers.discard(index)
            self._start(index)
        elif left and left == self.drained.get(index):
            # Ray starts the actor again where it has room, and not on a node that it drains.
            ray.kill(self.actors[index], no_restart=False)
            self._start(index)
        else:
            self.results[index] = result

    def _places(self) -> dict[int, str]:
        """Return the node of each actor."""
        return dict(placement_group_table(self.group)["bundles_to_node_id"])

    def _are_lost(self) -> bool:
        """Return whether each actor that runs waits for a node."""
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        nodes = {index: node for index, node in self._places().items() if node in living}
        return all(nodes.get(index) in (None, self.drained.get(index)) for index in self.running.values())

    def _drain(self) -> None:
        """Let the replicas on nodes that Ray drains leave the job in order."""
        leaving = set(cluster_state.get_draining_nodes())  # preempted, or no longer needed
        nodes = self._places() if leaving else {}
        for index in self.running.values():
            node, replica = nodes.get(index, ""), self._replica(index)
            if node not in leaving or self.asked.get(index) == node:
                continue
            order = {"replica": replica, "who": "Ray", "why": f"Ray drains node {node}"}
            try:
                with ThreadPoolExecutor(1) as pool:  # the caller's thread may run an event loop
                    pool.submit(self.lighthouses.ask, self.lighthouses.path("drain"), order).result()
            except Unreachable as error:
                _log.warning("replica %s cannot be drained now: %s", replica, error)
                continue  # the next look asks again
            except FabricError as error:
                _log.warning("replica %s stays until its node is gone: %s", replica, error)
            else:
                self.drained[index] = node
                first = index - index % self.nodes
                self.followers |= {i for i in range(first, first + self.nodes) if nodes.get(i) not in leaving}
            self.asked[index] = node


class _ReplicaActor:
    """The actor of one replica, or of one node of it."""

    def __init__(self, token: str, node: str) -> None:
        """Complete the settings of this process, whose folder is ``node`` of its replica's. The lighthouse
        asks for ``token``."""
        address = ray.util.get_node_ip_address()
        add_to_environment({"FABRIC_BIND": address, **process_environment()})
        home = config.settings().home / node
        add_to_environment({"FABRIC_RUN_DIR": str(home)})
        if token:
            make_private(home)
            add_to_environment({"FABRIC_TOKEN_FILE": str(_write_token(home, token))})

    def train(self, work: Callable[[], Any] | Sequence[str]) -> tuple[str, Any]:
        """Return an empty text and what the function ``work`` returned, or this node if the replica left it.

        End the process where a new process of this replica helps. Raises FabricError where none helps.
        """
        code: object
        try:
            if callable(work):
                return "", _call(work)
            code = _start("launch", *work).wait()
        except SystemExit as end:
            if hasattr(end, "ray_terminate_msg"):
                raise  # Ray ends this process, as after SIGTERM
            code = end.code
        if code in (None, FINISHED):
            return str(ray.get_runtime_context().get_node_id()), None
        if not isinstance(code, int) or code in FINAL_CODES:
            raise FabricError(f"it ended with {code}, and a restart does not help: see its last sentence")
        os._exit(RESTART)


class _LighthouseActor:
    """The actor of the job's lighthouse, which keeps its address and its ``folder`` when Ray restarts it."""

    def __init__(self, folder: Path, token: str) -> None:
        ready, before = folder / "ready.json", folder / "before.json"
        if ready.exists():
            ready.replace(before)
        port = str(urlsplit(_url_in(before)).port) if before.exists() else "0"
        options = ["--store", f"sqlite:///{folder}/lighthouse.db"]
        options += ["--token-file", str(_write_token(folder, token))]
        options += ["--bind", f"[{ray.util.get_node_ip_address()}]:{port}", "--ready-file", str(ready)]
        process = _start("lighthouse", *options)
        while not ready.exists():
            if process.poll() is not None:
                raise FabricError("the lighthouse has ended at its start: its log has the reason")
            time.sleep(0.01)
        self._url = _url_in(ready)
        threading.Thread(target=lambda: os._exit(process.wait() or RESTART), daemon=True).start()

    def url(self) -> str:
        return self._url


@contextlib.contextmanager
def _lighthouse(job: str, token: str) -> Iterator[str]:
    """Give the URL of a lighthouse in an actor on this node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    with tempfile.TemporaryDirectory(prefix="fabric-lighthouse-", ignore_cleanup_errors=True) as folder:
        actor = (
            ray.remote(_LighthouseActor)
            .options(name=f"fabric-lighthouse-{job}", num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            .remote(Path(folder), token)
        )
        try:
            yield ray.get(actor.url.remote())
        finally:
            ray.kill(actor)


def _actor(index: int, nodes: int, group: Any, environment: Mapping[str, str], token: str) -> Any:
    """Return the actor ``index``, in its bundle of the placement group."""
    resources = dict(group.bundle_specs[index])
    variables = {
        **environment,
        "FABRIC_REPLICA": f"r{index // nodes}",
        # The checkpoint server outlives its trainer.
        "RAY_kill_child_processes_on_worker_exit": "false",
    }
    return (
        ray.remote(_ReplicaActor)
        .options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=-1,
            max_task_retries=-1,
            runtime_env={"env_vars": variables},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        # Actors of one replica on one Ray node are hosts of their own.
        .remote(token, f"node{index % nodes}" if nodes > 1 else "")
    )


def _call(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        # Ray catches all exceptions, and a session waits for those that nothing catches.
        sys.excepthook(type(error), error, error.__traceback__)
        raise


def _start(*words: str) -> "subprocess.Popen[bytes]":
    """Start a command of fabric that ends with this actor."""
    return subprocess.Popen(
        own_program("fabric.cli.main", *words),
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509  (it makes two system calls)
    )


def _write_token(folder: Path, token: str) -> Path:
    path = folder / "token"
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(token)
    return path


def _url_in(ready_file: Path) -> str:
    return str(json.loads(ready_file.read_text())["url"])
