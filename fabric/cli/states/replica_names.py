"""Finds a state by the name of a replica, or by the value of ``FABRIC_DURABLE``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.ckpt_server.durable.reader import list_checkpoints
from fabric.ckpt_server.durable.storage import Storage
from fabric.cli.lighthouse_options import lighthouses_of
from fabric.errors import ConfigError, ProtocolError, StateError
from fabric.lighthouse.connections.validation import check_name
from fabric.runtime.http.lighthouse_client import understood


@dataclass(frozen=True, slots=True)
class StateNames:
    """Finds the states that users name, with the options of a command."""

    lighthouse: str
    job: str
    token_file: Path | None

    def find(self, *names: str) -> list[str]:
        """Return the path or URLs of each name. Replicas get one common step. Raises FabricError."""
        replicas = [name for name in names if self._is_replica(name)]
        if not replicas:
            return [self._in_job_folder(name) for name in names]
        lighthouses = lighthouses_of(self.lighthouse, self.job, self.token_file, needs_job=True)
        status = lighthouses.ask(lighthouses.path())
        with understood("the lighthouse"):
            held = {name: _held(status, name, self.job) for name in replicas}
            common = set.intersection(*(set(states) for states in held.values()))
            if not common:
                raise StateError(f"{_listed(held)}: they hold no step in common now; ask again in a moment")
            newest = max(common)
            return [held[x][newest] if x in held else self._in_job_folder(x) for x in names]

    def asks_lighthouse(self, *names: str) -> bool:
        """Whether one of the names is a replica's, so that the states that it stands for change."""
        return any(map(self._is_replica, names))

    def _is_replica(self, name: str) -> bool:
        try:
            check_name("replica", name)
        except ProtocolError:
            return False
        if Path(name).exists():
            return False
        if not self.lighthouse:
            raise ConfigError(
                f"there is no file {name}: correct its path, or give --lighthouse and --job for a replica"
            )
        return True

    def _in_job_folder(self, name: str) -> str:
        """Return the job's folder in ``name``, where that is a value of ``FABRIC_DURABLE``."""
        is_storage = Path(name).is_dir() or ("://" in name and not name.startswith(("http://", "https://")))
        if not is_storage or not self.job or "#" in name:
            return name
        folder = f"{name.rstrip('/')}/{self.job}"
        return folder if list_checkpoints(Storage(folder), self.job).complete else name


def _held(status: dict[str, Any], replica: str, job: str) -> dict[tuple[int, int], str]:
    """Return the URLs of the replica's states by generation and step: those that all of its ranks hold."""
    servers = [x for x in status["checkpoint_servers"] if x["replica"] == replica and x["ckpt"]]
    servers.sort(key=lambda server: server["rank"])
    if not servers:
        holders = ", ".join(sorted({x["replica"] for x in status["checkpoint_servers"]})) or "none"
        raise ConfigError(
            f"{replica} is neither a file nor a replica of job {job} that holds a state (these do: {holders})"
        )
    refs = [{(ref["generation"], ref["step"]) for ref in x["snapshots"]} for x in servers]
    return {
        (generation, step): ",".join(f"{x['ckpt'].rstrip('/')}/v1/snapshots/{step}" for x in servers)
        for generation, step in set.intersection(*refs)
    }


def _listed(held: dict[str, dict[tuple[int, int], str]]) -> str:
    steps = {name: ", ".join(str(step) for _, step in sorted(states)) for name, states in held.items()}
    return "; ".join(f"{name} holds step {text or 'none'}" for name, text in steps.items())
