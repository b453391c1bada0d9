"""Asks the lighthouse about the other members, for a replica that has no leader session yet."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fabric.errors import Refused, Unreachable
from fabric.runtime.config import Settings
from fabric.runtime.http.lighthouse_client import Lighthouses


def peers_hold_state(settings: Settings) -> bool | None:
    """Whether the job needs no storage to begin: another live member has the state, or the job is over.

    None where no lighthouse answers. Raises Unauthorized.
    """
    lighthouses = Lighthouses(settings.lighthouse, settings.job, settings.token.decode(), settings.tls)
    with ThreadPoolExecutor(1, "fabric-ask") as pool:  # the caller's own thread may be in an event loop
        try:
            job = pool.submit(lighthouses.ask, lighthouses.path()).result()
        except Unreachable:
            return None
        except Refused:
            return False
    over = bool(job["record"] and job["record"]["complete"])
    return over or any(_lives(member) for member in job["members"] if member["replica"] != settings.replica)


def _lives(member: dict[str, Any]) -> bool:
    return bool(member["connected"] and not member["joining"] and member["verdict"] == "alive")
