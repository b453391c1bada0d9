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
from dataclasses import dataclass, replace
from importlib import metadata
from types import MappingProxyType
from typing import Any

from fabric.errors import ConfigError
from fabric.runtime import config
from fabric.runtime.config import Settings

_LONGEST = 60  # characters of a value in a sentence


@dataclass(frozen=True, slots=True)
class Row:
    """The treatment of one argument. ``kind``: "kept", "idle" or "refused"; ``words`` say more.

    kept: the training is as the argument says, and the words name the test or recipe that shows it. idle: the
    argument does not change what is trained, and the words say what it does. refused: any value but the
    default is refused, and the words are the reason and the remedy, for the end of a sentence.
    ``accepts``: tells which other values are as good as the default.
    """

    kind: str
    words: str
    accepts: Callable[[Any], bool] | None = None


Accepts = Mapping[str, Callable[[Any], bool]]


def rows_of(text: str, accepts: Accepts = MappingProxyType({})) -> dict[str, Row]:
    """Return the rows of a table: a line of ``text`` has names, the kind of their row, and its words.

    A line that is indented goes on with the line before. ``accepts``: that of refusals, by name.
    """
    rows: dict[str, Row] = {}
    for line in filter(None, re.sub(r"\n +", " ", inspect.cleandoc(text)).splitlines()):
        names, kind, words = line.split(" | ")
        assert kind in ("kept", "idle", "refused"), line
        rows |= dict.fromkeys(names.split(), Row(kind, words))
    return rows | {name: replace(rows[name], accepts=test) for name, test in accepts.items()}


class ArgumentTable:
    """The rows of one API. ``subject``: its name, as users write it; ``by``: the part of fabric that refuses.

    ``rows`` and ``accepts`` are as in ``rows_of``. ``methods``: the rows of methods that users may override.
    """

    def __init__(
        self, subject: str, by: str, rows: str, accepts: Accepts = MappingProxyType({}), methods: str = ""
    ) -> None:
        self.subject, self.by = subject, by
        self.rows, self.methods = rows_of(rows, accepts), rows_of(methods)

    def unknown(self, api: Callable[..., Any]) -> list[str]:
        """Return the arguments of ``api`` in the installed release that have no row."""
        return [name for name in _defaults(api) if name not in self.rows]

    def check(self, api: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """Raise ConfigError for the first value of ``given`` that is refused or unknown.

        ``given`` may have defaults too: a value that equals its default is always accepted.
        """
        defaults = _defaults(api)
        for name, value in given.items():
            if not _equal(value, defaults.get(name)):
                self.check_value(name, value)

    def check_value(self, name: str, value: Any, shown: str = "") -> None:
        """Raise ConfigError for a value that is not the default, if it is refused or unknown.

        ``shown``: the argument with its value as the sentence has them.
        """
        row, shown = self.rows.get(name), shown or f"{name}={_short(value)}"
        if row is None:
            raise ConfigError(
                f"{self.by} does not know {self.subject}({shown}), an argument of a newer release: leave it "
                "out"
            )
        if row.kind == "refused" and not (row.accepts is not None and row.accepts(value)):
            raise ConfigError(f"{self.by} refuses {self.subject}({shown}), because {row.words}")

    def check_methods(self, base: type, kind: type, among: Iterable[str] | None = None) -> None:
        """Raise ConfigError where ``kind`` overrides a method of ``base`` that is refused or has no row.

        ``among``: the methods that count; all without it.
        """
        names = set(overridable(base) if among is None else among)
        for name, owner in overridden(base, kind).items():
            row = self.methods.get(name)
            if name in names and row is None:
                raise ConfigError(
                    f"{self.by} does not know what {owner.__name__}.{name} changes, which replaces that of "
                    f"{self.subject} in a newer release: leave the method out"
                )
            if name in names and row is not None and row.kind == "refused":
                raise ConfigError(f"{self.by} refuses {owner.__name__}.{name}, because {row.words}")


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
        given = [x for x in dataclasses.fields(api) if x.init]
        made = {x.name: x.default_factory() for x in given if x.default_factory is not dataclasses.MISSING}
        return {x.name: ... if x.default is dataclasses.MISSING else x.default for x in given} | made
    parameters = inspect.signature(api).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
    return {p.name: ... if p.default is p.empty else p.default for p in named}


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
UNEQUAL = re.compile("8bit|4bit|bitsandbytes|lomo|galore|apollo|layerwise|schedule_?free", re.IGNORECASE)


def settings_among(arguments: Mapping[str, Any]) -> Settings:
    """Return this replica's settings; those among the ``arguments`` of ``attach`` replace the environment."""
    return config.settings(**{name: x for name, x in arguments.items() if name in Settings.__struct_fields__})


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
