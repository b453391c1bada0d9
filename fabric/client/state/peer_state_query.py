"""What the lighthouse knows of the others, for a replica that does not take part yet."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fabric.errors import Refused, Unreachable
from fabric.runtime.config import Settings
from fabric.runtime.http.lighthouse_client import Lighthouses


def peers_hold_state(found: Settings) -> bool | None:
    """Whether a member of the job other than this replica lives and knows the state, or the job is over: then
    nobody needs storage to begin from. None where no lighthouse tells. Raises Unauthorized."""
    lighthouses = Lighthouses(found.lighthouse, found.job, found.token.decode(), found.tls)
    with ThreadPoolExecutor(1, "fabric-ask") as pool:  # the caller's own thread may be in an event loop
        try:
            job = pool.submit(lighthouses.ask, lighthouses.path()).result()
        except Unreachable:
            return None
        except Refused:
            return False
    over = bool(job["record"] and job["record"]["complete"])
    return over or any(_lives(member) for member in job["members"] if member["replica"] != found.replica)


def _lives(member: dict[str, Any]) -> bool:
    return bool(member["connected"] and not member["joining"] and member["verdict"] == "alive")
