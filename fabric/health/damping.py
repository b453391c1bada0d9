"""On a crowded host devices are slow for moments: after such a slowdown the next one must last before it is
told."""

from collections.abc import Collection

SHORT = 30  # steps: a slowdown that ends sooner was not worth a word
FIRST = 5  # steps that the next slowdown must last, after the first short one; then more and more
MOST = 40
CALM = 300  # steps without a short slowdown halve what is asked of the next one


class Damping:
    """Lets slowdowns through when they have lasted; at first at once."""

    def __init__(self) -> None:
        self.needed = 0  # steps that a slowdown must last
        self._since: dict[str, int] = {}  # name -> the step since which it is slow
        self._told: dict[str, int] = {}  # name -> the step at which it was let through
        self._calm_since = 0
        self._step = 0

    def admit(self, slow: Collection[str], step: int) -> set[str]:
        """Return those of ``slow`` to tell of at this step. Steps may go back, when the job begins again."""
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
