"""Asks the lighthouse for the job's status, in a thread, because a stopped lighthouse answers late."""

import threading
import time
from contextlib import suppress
from typing import Any

from fabric.drill.judge.drill_record import HeadlineSighting, StepSighting
from fabric.errors import FabricError
from fabric.runtime.http.lighthouse_client import Lighthouses

_EVERY_S = 1.0


class StatusPoller:
    """Polls from ``start`` to ``close``; ``sightings`` has the steps that the lighthouse named, ``headlines``
    its first lines."""

    def __init__(self, client: Lighthouses) -> None:
        self._client = client
        self._over = threading.Event()
        self._seen: list[StepSighting] = []
        self._headlines: list[HeadlineSighting] = []
        self._thread = threading.Thread(target=self._run, name="fabric-drill-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=10.0)

    @property
    def sightings(self) -> tuple[StepSighting, ...]:
        return tuple(self._seen)

    @property
    def headlines(self) -> tuple[HeadlineSighting, ...]:
        return tuple(self._headlines)

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._look()
        self._look()  # the last fault's replica may be back since the look before

    def _look(self) -> None:
        with suppress(FabricError):
            status = self._client.ask(self._client.path())
            now = time.time()
            self._seen += _steps(status, now)
            if isinstance(status, dict) and isinstance(text := status.get("headline"), str):
                self._headlines.append(HeadlineSighting(now, text))


def _steps(status: Any, now: float) -> list[StepSighting]:
    """Return the steps of the connected members; of another form of status, none."""
    members = status.get("members") if isinstance(status, dict) else None
    return [
        StepSighting(now, str(member.get("replica")), member["step"])
        for member in members or ()
        if isinstance(member, dict) and member.get("connected") and isinstance(member.get("step"), int)
    ]
