"""Tables that account for every argument and overridable method of an API that users call.

A row says what fabric does with the argument: it is kept, it has no influence on what is trained, or it is
refused. The arguments come from the installed release, by introspection. An argument without a row is refused
unless it has its default, so a new release cannot change the training in silence.
"""

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

from fabric.errors import ConfigError

_LONGEST = 60  # characters of a value in a sentence


@dataclass(frozen=True, slots=True)
class Kept:
    """The training is as the argument says. ``shown_by``: the test or recipe that shows it."""

    shown_by: str


@dataclass(frozen=True, slots=True)
class NoInfluence:
    """The argument does not change what is trained. ``why``: what it does."""

    why: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Any value but the default is refused. ``why``: the reason and the remedy, for the end of a sentence.

    ``accepts``: tells which other values are as good as the default.
    """

    why: str
    accepts: Callable[[Any], bool] | None = None


Row = Kept | NoInfluence | Refusal


_KINDS: Mapping[str, Callable[[str], Row]] = {"kept": Kept, "idle": NoInfluence, "refused": Refusal}


def rows_of(text: str, accepts: Mapping[str, Callable[[Any], bool]] = MappingProxyType({})) -> dict[str, Row]:
    """Return the rows of a table: a line of ``text`` has names, kept, idle or refused, and the row's words.

    A line that is indented goes on with the line before. ``accepts``: that of refusals, by name.
    """
    rows: dict[str, Row] = {}
    for line in re.sub(r"\n +", " ", inspect.cleandoc(text)).splitlines():
        names, kind, words = line.split(" | ")
        rows |= dict.fromkeys(names.split(), _KINDS[kind](words))
    return rows | {name: Refusal(rows[name].why, test) for name, test in accepts.items()}  # type: ignore[union-attr]


class ArgumentTable:
    """The rows of one API. ``subject``: its name, as users write it; ``by``: the part of fabric that refuses.

    ``methods``: rows of the methods that a user's subclass may override.
    """

    def __init__(
        self, subject: str, by: str, rows: Mapping[str, Row], methods: Mapping[str, Row] | None = None
    ) -> None:
        self.subject, self.by, self.rows, self.methods = subject, by, dict(rows), dict(methods or {})

    # --- arguments ----------------------------------------------------------------------------------------

    def unknown(self, api: Callable[..., Any]) -> list[str]:
        """Return the arguments of ``api`` in the installed release that have no row."""
        return [name for name in _defaults(api) if name not in self.rows]

    def check(self, api: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """Raise ConfigError for the first value of ``given`` that is refused or unknown.

        ``given`` may have defaults too: a value that equals its default is always accepted.
        """
        defaults = _defaults(api)
        for name, value in given.items():
            row = self.rows.get(name)
            if isinstance(row, Kept | NoInfluence) or _equal(value, defaults.get(name)):
                continue
            if row is None:
                raise ConfigError(
                    f"{self.by} does not know {self.subject}({name}={_short(value)}), an argument of a newer "
                    f"release: leave it out"
                )
            if row.accepts is None or not row.accepts(value):
                raise ConfigError(
                    f"{self.by} refuses {self.subject}({name}={_short(value)}), because {row.why}"
                )

    # --- methods ------------------------------------------------------------------------------------------

    def unknown_methods(self, base: type, ignored: Iterable[str] = ()) -> list[str]:
        """Return the public and private methods of ``base`` that have no row."""
        return [name for name in overridable(base) if name not in self.methods and name not in set(ignored)]

    def check_methods(self, base: type, kind: type, ignored: Iterable[str] = ()) -> None:
        """Raise ConfigError where ``kind`` overrides a method of ``base`` that is refused or has no row."""
        for name, owner in overridden(base, kind).items():
            row = self.methods.get(name)
            if isinstance(row, Kept | NoInfluence) or name in set(ignored):
                continue
            if row is None:
                raise ConfigError(
                    f"{self.by} does not know what {owner.__name__}.{name} changes, which replaces that of "
                    f"{self.subject}: leave the method out"
                )
            raise ConfigError(f"{self.by} refuses {owner.__name__}.{name}, because {row.why}")


def refusals(tables: Mapping[str, Mapping[str, Row]]) -> str:
    """Return what the rows of each table refuse, as a page has it: each title and reason once."""
    lines = []
    for title, rows in tables.items():
        names: dict[str, list[str]] = {}
        for name, row in sorted(rows.items()):
            if isinstance(row, Refusal):
                names.setdefault(row.why, []).append(f"`{name}`")
        cells = [f"{', '.join(names[why])} | {why} |" for why in sorted(names)]
        lines += [f"| {'' if i else title} | {cell}" for i, cell in enumerate(cells)]
    return "\n".join(["| of | refused | because, and instead |", "|---|---|---|", *lines]) + "\n"


def overridable(base: type) -> list[str]:
    """Return the names of the methods and properties that ``base`` has beyond those of every object."""
    return sorted(
        name
        for name in dir(base)
        if not hasattr(object, name) and _is_method(inspect.getattr_static(base, name))
    )


def overridden(base: type, kind: type) -> dict[str, type]:
    """Return the methods of ``base`` that ``kind`` replaces, each with the class that replaces it."""
    names = set(overridable(base))
    owners: dict[str, type] = {}
    for owner in kind.__mro__:
        if owner not in base.__mro__:
            own = [name for name, value in vars(owner).items() if name in names and _is_method(value)]
            owners = {**dict.fromkeys(own, owner), **owners}
    return owners


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def _defaults(api: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a function or class with their defaults; ``...`` where there is none."""
    if isinstance(api, type) and dataclasses.is_dataclass(api):
        return {f.name: _default_of(f) for f in dataclasses.fields(api) if f.init}
    parameters = inspect.signature(api).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
    return {p.name: ... if p.default is p.empty else p.default for p in named}


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return ... if field.default is dataclasses.MISSING else field.default


def _equal(value: Any, default: Any) -> bool:
    try:
        return value is default or bool(type(value) is type(default) and value == default)
    except Exception:  # noqa: BLE001  (an array, or a user's comparison)
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST and "\n" not in text else f"<{type(value).__name__}>"


# In the names of optimizers that cannot be kept equal on all replicas. States of 8 and 4 bits, updates inside
# backward, projectors, and weights that differ between training and evaluation: fabric cannot capture their
# state, or replay their update.
_UNEQUAL = (
    "8bit",
    "4bit",
    "bitsandbytes",
    "lomo",
    "galore",
    "apollo",
    "layerwise",
    "schedule_free",
    "schedulefree",
)


def unequal_optimizer(kind: str) -> str:
    """Return ``kind``, the name of an optimizer or its class, if it is one of these; else an empty string."""
    return kind if any(word in kind.lower() for word in _UNEQUAL) else ""


_log = logging.getLogger("fabric")


def check_version(framework: str, least: str, tested: str) -> None:
    """Raise ConfigError where the installed ``framework`` is older than ``least``.

    Another release than ``tested`` is allowed, and the log says so: its inside may differ.
    """
    version = metadata.version(framework)
    if _numbers(version) < _numbers(least):
        raise ConfigError(
            f"{framework} {version} is installed, and fabric.integrations.{framework} needs {least} or newer "
            f"(tested with {tested}): run pip install -U {framework}"
        )
    if _numbers(version)[:2] != _numbers(tested)[:2]:
        _log.warning(
            "%s %s is not %s, the release that fabric.integrations.%s was tested with",
            framework,
            version,
            tested,
            framework,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release's numbers, without what follows them: "5.23.0rc1" is (5, 23, 0)."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(x) for x in release[0].split(".")) if release is not None else ()
