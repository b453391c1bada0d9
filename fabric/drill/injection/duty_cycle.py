"""A process that runs for a quarter of the time: SIGSTOP and SIGCONT by turns, in a thread."""

import signal
import threading

from fabric.drill.injection.drilled_processes import ProcessTarget

_CYCLE_S, _RUNS_S = 0.1, 0.025
_STOPS_SEEN = 3


class DutyCycle:
    """Stops and continues ``target`` from ``start`` to ``close``. The caller lists it with the guard."""

    def __init__(self, target: ProcessTarget) -> None:
        self._target = target
        self._over = threading.Event()
        self._stops = 0  # stops that the kernel has confirmed
        self._thread = threading.Thread(target=self._run, name="fabric-drill-slow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def evidence(self) -> str:
        """The evidence that the process was stopped again and again, or an empty string."""
        if self._stops < _STOPS_SEEN:
            return ""
        return f"process {self._target.pid} was stopped {self._stops} times"

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._target.send(signal.SIGSTOP)
            self._over.wait(_CYCLE_S - _RUNS_S)
            self._stops += self._target.is_stopped
            self._target.send(signal.SIGCONT)
            self._over.wait(_RUNS_S)
