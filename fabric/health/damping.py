"""On a crowded host devices are slow for short times. After a short slowdown, the next slowdown is reported
only once it has lasted."""

from collections.abc import Collection

SHORT = 30  # number of steps: a slowdown that ends sooner should not have been reported
FIRST = 5  # steps that a slowdown must last after one short slowdown; further short slowdowns raise it
MOST = 40
CALM = 300  # after this number of steps without a short slowdown, ``needed`` is halved


class Damping:
    """Decides which slowdowns are reported: at first each one at once, later those that have lasted."""

    def __init__(self) -> None:
        self.needed = 0  # steps that a slowdown must last before its report
        self._since: dict[str, int] = {}  # name -> the step at which it became slow
        self._told: dict[str, int] = {}  # name -> the step at which its slowdown was first reported
        self._calm_since = 0
        self._step = 0

    def admit(self, slow: Collection[str], step: int) -> set[str]:
        """Return the names of ``slow`` to report at this step. ``step`` may fall if the job begins again."""
        if step < self._step:
            self._since, self._told, self._calm_since = {}, {}, step
        self._step = step
        for name in set(self._told) - set(slow):
            if step - self._told.pop(name) < SHORT:
                self.needed = min(MOST, 2 * self.needed + FIRST)
        if any(step - since < SHORT for name, since in self._since.items() if name not in slow):
            self._calm_since = step
        if step - self._calm_since >= CALM:
            self.needed, self._calm_since = self.needed // 2, step
        self._since = {name: self._since.get(name, step) for name in slow}
        for name, since in self._since.items():
            if step - since >= self.needed:
                self._told.setdefault(name, step)
        return set(self._told)
