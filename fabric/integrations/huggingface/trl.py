"""The trainers of trl: figures that they gather over their processes, and what they cannot keep equal.

A trainer of trl has a list of numbers per figure in ``_metrics["train"]``, and logs the mean. A replica sees
its own micro-batches. So each micro-batch's numbers travel in the step's sums, and every replica takes the
mean.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

_SUM, _COUNT, _OWN = "trl.sum.", "trl.count.", "trl.tokens"  # names, or their beginnings, of a step's sums

KNOWN = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")

_ALONE = "each replica would see its own completions only; choose {}"
# Arguments of GRPOConfig: name, the values that are kept, and why the others are not, with what to do.
_GRPO: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("num_iterations", (1,), "completions that are used again wait in one replica; choose 1"),
    ("use_vllm", (False,), "vLLM draws random numbers of its own; choose False"),
    ("use_transformers_continuous_batching", (False,), "it draws random numbers of its own; choose False"),
    ("scale_rewards", ("group", "none"), _ALONE.format('"group"')),
    ("top_entropy_quantile", (1.0,), _ALONE.format("1.0")),
    ("use_adaptive_entropy", (False,), _ALONE.format("False")),
    ("log_completions", (False,), _ALONE.format("False")),
)


class TrlFigures:
    """The figures of ``trainer``; none where the trainer is not one of trl."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        own = trl_class(trainer)
        self._lists: Any = trainer._metrics["train"] if own is not None else {}  # noqa: SLF001

    @contextlib.contextmanager
    def of_micro_batch(self) -> Iterator[dict[str, float]]:
        """Take the numbers that a micro-batch adds out of the lists, into the yielded sums."""
        sums: dict[str, float] = {}
        kept, tokens = self.state_dict(), self._tokens
        self._lists.clear()
        try:
            yield sums
            for name, numbers in self._lists.items():
                valid = [x for x in numbers if x == x]  # trl leaves out what is not a number
                if valid and name != "num_tokens":
                    sums |= {_SUM + name: float(sum(valid)), _COUNT + name: float(len(valid))}
            sums |= {_OWN: float(self._tokens - tokens)} if self._tokens != tokens else {}
        finally:
            self.load_state_dict({**kept, "tokens": [tokens]})

    def add_step(self, totals: Mapping[str, float]) -> None:
        """Add the numbers of a whole step of the job."""
        self._tokens += int(totals.get(_OWN, 0.0))
        for name in sorted(totals):
            if name.startswith(_SUM):
                figure, count = name.removeprefix(_SUM), int(totals[_COUNT + name.removeprefix(_SUM)])
                self._lists[figure] += [totals[name] / count] * count
                seen = self._trainer.state.num_input_tokens_seen + int(totals.get("tokens", 0.0))
                self._lists["num_tokens"] = [self._tokens or seen]

    def state_dict(self) -> dict[str, list[float]]:
        """Return the numbers that no log has yet, and the tokens that the trainer counts itself."""
        return {**{name: list(x) for name, x in sorted(self._lists.items())}, "tokens": [self._tokens]}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Take over numbers and tokens."""
        self._lists.clear()
        self._lists.update({name: list(x) for name, x in state.items() if name != "tokens"})
        self._tokens = int(state["tokens"][0])

    @property
    def _tokens(self) -> int:
        """Tokens since the training began, where the trainer counts them itself; else 0."""
        return int(getattr(self._trainer, "_total_train_tokens", 0))

    @_tokens.setter
    def _tokens(self, tokens: int) -> None:
        if hasattr(self._trainer, "_total_train_tokens"):
            self._trainer._total_train_tokens = tokens  # noqa: SLF001


def trl_class(trainer: Any) -> type | None:
    """Return the class of trl that ``trainer`` is an instance of, or None."""
    classes = (
        x for x in type(trainer).__mro__ if x.__module__.startswith("trl.") and "_metrics" in vars(trainer)
    )
    return next(classes, None)


def refusals(trainer: Any) -> Iterator[str]:
    """Yield what a trainer of trl cannot keep equal, each with what to do."""
    own, args = trl_class(trainer), trainer.args
    if own is None:
        return
    if own.__name__ not in KNOWN:
        yield f"the {own.__name__} of trl: it knows {', '.join(KNOWN)}"
    if getattr(args, "sync_ref_model", False):
        yield "sync_ref_model=True, a second model that changes: leave it out"
    if own.__name__ != "GRPOTrainer":
        return
    if args.steps_per_generation != 1:
        yield (
            f"steps_per_generation={args.steps_per_generation}, whose completions wait in one replica: "
            "choose steps_per_generation=1, and a per_device_train_batch_size that is a multiple of "
            "num_generations"
        )
    for name, kept, remedy in _GRPO:
        if (given := getattr(args, name, kept[0])) not in kept:
            yield f"{name}={given!r}: {remedy}"
