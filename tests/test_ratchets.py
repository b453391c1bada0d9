"""Counts of the source that may only fall; ``python tests/test_ratchets.py`` prints them.

A change that lowers a count lowers its limit here, in the same commit. A change that must raise one (a new
feature adds lines to fabric/) raises the limit and says why in its commit message.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import click
import pytest

from fabric.cli.main import _GROUPS, cli

ROOT = Path(__file__).parent.parent

LIMITS = {
    "most files in one folder": 20,
    "class names in more than one file": 0,
    "most attributes of one class": 20,
    "classes with more than 20 attributes": 0,
    "parameters that are tuples of unlike things": 0,
    "sentences that begin with a headless who or what": 0,
    "locals with a vague name": 0,
    "writes of a shell into a core": 0,
    "writes of a part of a core into another part": 0,
    "banned phrases in docstrings and comments": 1,
    "banned phrases in pages": 0,
    "lines of fabric/": 82_229,
    "files of fabric/": 350,
    "packages over their budget of lines": 0,
    "single-use helpers of at most four lines, per 1,000 lines": 0.47,
    "functions that only forward": 61,
    "settings": 30,
    "flags and arguments of commands": 87,
    "commands in the first help": 8,
    "lines of fabric/ per function": 14.68,
}
# Package -> its most lines, in hundreds. Only a person raises a budget.
BUDGETS = {
    "audit": 1_406,
    "ckpt_server": 10_853,
    "cli": 4_958,
    "client": 16_593,
    "collectives": 1_237,
    "drill": 4_074,
    "ftar": 5_136,
    "health": 1_297,
    "integrations": 8_613,
    "lighthouse": 8_206,
    "model and errors": 633,
    "plan": 1_558,
    "protocol": 11_517,
    "runtime": 3_692,
    "store": 1_383,
    "transport": 1_073,
}

MAX_ATTRIBUTES = 20
# A message of the wire, the stored record, and the environment: each field is a named fact with a line of its
# own. Splitting such a class would only add a level to the JSON and the tables that people read.
FLAT_VALUES = {"OpenSession", "Record", "Settings"}
VAGUE_LOCALS = {"found", "said", "told", "known", "mine", "whole", "one"}
HEADLESS = re.compile(r"(?:Who|What|Whoever|Whom|Of those|Nobody|Whichever)\b")
BANNED = re.compile(
    r"\b(?:is had|are had|beside the steps|by itself|anew|whoever"
    r"|(?<!there )(?:is|are) no (?!longer\b|more\b|less\b)\w+)",
    re.IGNORECASE,
)
CORE_FOLDERS = ("fabric/protocol/leader/", "fabric/protocol/member/")
# The statements and parameters for which ``names_for`` finds a name.
NAMERS = (
    ast.arg,
    ast.FunctionDef,
    ast.AnnAssign,
    ast.Assign,
    ast.NamedExpr,
    ast.For,
    ast.comprehension,
)
# What a shell may call of a core and its parts: the contract, and questions.
CORE_QUERIES = {"handle", "next_deadline", "own_contribution", "statuses", "durable", "freshest", "age_s"}
CORE_QUERIES |= {"urls_of", "suspicion", "failure_reason", "proven_dead", "last_contact", "servers_to_hear"}
CORE_QUERIES |= {"top_step", "patience_s", "kept_out", "knows", "objection", "knows_of"}
CORE_QUERIES |= {"penalties", "hosts_that_failed", "awaited_own_state", "own_state_until", "candidates"}
CORE_QUERIES |= {"recent_actions", "missing", "lists", "suspect_hosts"}
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
MUTATORS |= {"sort", "update"}
GETTERS = {"get", "items", "setdefault", "statuses", "values"}

Sources = Mapping[str, str]


@cache
def sources() -> Sources:
    return {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "fabric").rglob("*.py"))}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(text)))


def pages() -> dict[str, str]:
    """The pages that say what holds today, but for CONTRIBUTING.md, which lists the phrases."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "design").glob("*.md")]
    return {
        str(p.relative_to(ROOT)): p.read_text()
        for p in paths
        if p.name not in ("CHANGELOG.md", "CONTRIBUTING.md")
    }


# --- shape ------------------------------------------------------------------------------------------------


def files_per_folder(files: Sources) -> Counter[str]:
    return Counter(str(Path(name).parent) for name in files if not name.endswith("__init__.py"))


def homonyms(files: Sources) -> dict[str, set[str]]:
    """Class name -> the files that define it, where these are several."""
    places: dict[str, set[str]] = {}
    for name, text in files.items():
        for node in nodes(text):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(name)
    return {name: where for name, where in places.items() if len(where) > 1}


@cache
def imported_from(text: str) -> dict[str, str]:
    """Name -> the file that it is imported from, as a path."""
    return {
        alias.asname or alias.name: node.module.replace(".", "/") + ".py"
        for node in nodes(text)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def own_attributes(node: ast.ClassDef) -> set[str]:
    """Fields of a dataclass, and what any method assigns to ``self``."""
    fields = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    }
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    return fields | {
        target.attr
        for method in methods
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def attributes(files: Sources) -> dict[str, int]:
    """Class -> how many attributes its instances have, inherited ones included."""
    classes = {
        (name, node.name): node
        for name, text in files.items()
        for node in nodes(text)
        if isinstance(node, ast.ClassDef)
    }

    def of(key: tuple[str, str]) -> set[str]:
        node, (name, _) = classes[key], key
        total = own_attributes(node)
        for base in node.bases:
            word = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(word, ast.Name):
                parent = (imported_from(files[name]).get(word.id, name), word.id)
                if parent in classes and parent != key:
                    total |= of(parent)
        return total

    return {f"{name}:{word}": len(of((name, word))) for name, word in classes}


def large_classes(files: Sources) -> dict[str, int]:
    return {
        name: count
        for name, count in attributes(files).items()
        if count > MAX_ATTRIBUTES and name.split(":")[1] not in FLAT_VALUES
    }


def is_mixed_tuple(node: ast.expr | None, aliases: Mapping[str, ast.expr]) -> bool:
    """Whether an annotation is, or may be, a tuple with a fixed number of parts of several types."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return is_mixed_tuple(ast.parse(node.value, mode="eval").body, aliases)
    if isinstance(node, ast.BinOp):
        return is_mixed_tuple(node.left, aliases) or is_mixed_tuple(node.right, aliases)
    if isinstance(node, ast.Name) and node.id in aliases:
        return is_mixed_tuple(aliases[node.id], {})
    if not (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple"):
        return False
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    texts = [ast.unparse(part) for part in parts]
    return "..." not in texts and len(set(texts)) > 1


def mixed_tuples(files: Sources) -> list[str]:
    """Every parameter that is a tuple of unlike things, also by an alias of the module."""
    aliases = {
        node.targets[0].id: node.value
        for text in files.values()
        for node in parsed(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return [
        f"{name}:{node.name}({argument.arg})"
        for name, text in files.items()
        for node in nodes(text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if is_mixed_tuple(argument.annotation, aliases)
    ]


def classes_of_cores(files: Sources) -> dict[str, ast.ClassDef]:
    """The classes of which the member core and the leader core are made."""
    return {
        node.name: node
        for name, text in files.items()
        if name.startswith(CORE_FOLDERS)
        for node in nodes(text)
        if isinstance(node, ast.ClassDef)
    }


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef)]


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(x) in ("property", "cached_property") for x in node.decorator_list)


def words_of(annotation: ast.expr | None) -> set[str]:
    return set(re.findall(r"\w+", ast.unparse(annotation))) if annotation is not None else set()


def is_below(node: ast.expr, words: set[str]) -> bool:
    """Whether an expression is a field or an entry of what one of the words names."""
    while isinstance(node, ast.Attribute | ast.Subscript) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GETTERS
    ):
        if isinstance(node, ast.Attribute) and "." + node.attr in words:
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in words


def assigned(node: ast.AnnAssign | ast.Assign | ast.NamedExpr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Each target of an assignment with its value."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


@cache
def namers(text: str) -> tuple[ast.AST, ...]:
    return tuple(node for node in nodes(text) if isinstance(node, NAMERS))


def names_for(node: ast.AST, kinds: set[str], words: set[str]) -> Iterator[str]:
    """What a statement or parameter calls a part of a core; a field begins with a dot."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.arg) and words_of(node.annotation) & kinds:
        yield node.arg
    elif isinstance(node, ast.FunctionDef) and words_of(node.returns) & kinds:
        yield "." + node.name
    elif isinstance(node, ast.AnnAssign | ast.Assign | ast.NamedExpr):
        for target, value in assigned(node):
            made = words_of(value.func) if isinstance(value, ast.Call) else set()
            typed = words_of(getattr(node, "annotation", None)) | made
            if typed & kinds or (value is not None and is_below(value, words)):
                targets.append(target)
    elif isinstance(node, ast.For | ast.comprehension) and is_below(node.iter, words):
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
    for target in targets:
        if isinstance(target, ast.Name | ast.Attribute):
            yield target.id if isinstance(target, ast.Name) else "." + target.attr


def writes_below(node: ast.AST, words: set[str]) -> bool:
    """Whether a statement stores, deletes or changes something in what one of the words names."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return is_below(node.value, words)
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in MUTATORS and is_below(called.value, words)


def functions_of(text: str) -> list[ast.AST]:
    """The functions of a module and the methods of its classes, without those within another one."""
    holders = [parsed(text), *(node for node in nodes(text) if isinstance(node, ast.ClassDef))]
    return [x for h in holders for x in h.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]


def core_writes(files: Sources) -> list[str]:
    """Every write of a shell into a core: a field, an entry, or a call of a method that may change it."""
    classes = classes_of_cores(files)
    kinds = {"LeaderCore", "MemberCore", *classes}
    methods = {f.name for node in classes.values() for f in methods_of(node) if not is_property(f)}
    commands = methods - CORE_QUERIES
    writes, holders = [], {"LeaderCore", "MemberCore"}
    shells = {name: text for name, text in files.items() if not name.startswith(CORE_FOLDERS)}
    # A module may get a core from a field of another module's class, such as ``job.core``.
    cores = {w for text in shells.values() for node in namers(text) for w in names_for(node, holders, set())}
    for name, text in shells.items():
        typed = {w for node in namers(text) for w in names_for(node, kinds, set())}
        fields = {w for w in cores | typed if w.startswith(".")}
        for function in functions_of(text):
            inner, words = list(ast.walk(function)), set(fields)
            inner_namers = [node for node in inner if isinstance(node, NAMERS)]
            for _ in range(2):  # a name of a name
                words |= {word for node in inner_namers for word in names_for(node, kinds, words)}
            for node in inner:
                called = node.func if isinstance(node, ast.Call) else None
                commanded = isinstance(called, ast.Attribute) and called.attr in commands
                if writes_below(node, words) or (commanded and is_below(called.value, words)):
                    writes.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    return writes


def foreign_writes(files: Sources) -> list[str]:
    """Every write of a part of a core into a field of another part, which it was given or holds."""
    classes, writes = classes_of_cores(files), []
    for name, text in files.items():
        for holder in (node for node in nodes(text) if isinstance(node, ast.ClassDef)):
            if not name.startswith(CORE_FOLDERS) or not (methods := methods_of(holder)):
                continue
            taken = {"." + word for word in parts_taken(holder, set(classes))}
            for function in methods:
                inner, words = list(ast.walk(function)), set(taken)
                for _ in range(2):
                    words |= {w for node in inner for w in names_for(node, set(), words) if "." not in w}
                writes += [
                    f"{name}:{node.lineno} {ast.unparse(node)}" for node in inner if writes_below(node, words)
                ]
    return writes


def parts_taken(holder: ast.ClassDef, classes: set[str]) -> Iterator[str]:
    """The fields in which a part keeps other parts that it was given; the public fields of a core."""
    for item in holder.body if holder.decorator_list else ():
        if isinstance(item, ast.AnnAssign) and item.value is None and words_of(item.annotation) & classes:
            yield item.target.id
    for init in (f for f in methods_of(holder) if f.name == "__init__"):
        given = {x.arg for x in init.args.args if words_of(x.annotation) & classes}
        for node in ast.walk(init):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            is_given = isinstance(value, ast.Name) and value.id in given
            for target in targets if is_given or holder.name.endswith("Core") else ():
                if isinstance(target, ast.Attribute) and not (not is_given and target.attr.startswith("_")):
                    yield target.attr


# --- words ------------------------------------------------------------------------------------------------


@cache
def prose(text: str) -> tuple[str, ...]:
    """The docstrings of a module, and its comments; comments on neighbouring lines are one text."""
    texts = [
        ast.get_docstring(node) or ""
        for node in nodes(text)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            if token.start[0] == last + 1:
                texts[-1] += " " + words
            else:
                texts.append(words)
            last = token.start[0]
    return tuple(texts)


def sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z`])", joined)


def headless(files: Sources) -> list[str]:
    return [
        f"{name}: {sentence[:80]}"
        for name, text in files.items()
        for block in prose(text)
        for sentence in sentences(block)
        if HEADLESS.match(sentence) and not sentence.endswith("?")
    ]


def banned(files: Sources) -> list[str]:
    return [
        f"{name}: ...{block[max(0, hit.start() - 30) : hit.end() + 10]}".replace("\n", " ")
        for name, text in files.items()
        for block in (prose(text) if name.endswith(".py") else [text])
        for hit in BANNED.finditer(block)
    ]


def vague_locals(files: Sources) -> list[str]:
    return [
        f"{name}:{node.lineno} {node.arg if isinstance(node, ast.arg) else node.id}"
        for name, text in files.items()
        for node in nodes(text)
        if (isinstance(node, ast.arg) and node.arg in VAGUE_LOCALS)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_LOCALS)
    ]


# --- size -------------------------------------------------------------------------------------------------


def lines_of(files: Sources) -> int:
    return sum(len(text.splitlines()) for text in files.values())


def lines_by_package(files: Sources) -> Counter[str]:
    lines: Counter[str] = Counter()
    for name, text in files.items():
        folder = Path(name).parts[1] if len(Path(name).parts) > 2 else "model and errors"
        lines[folder] += len(text.splitlines())
    return lines


def over_budget(files: Sources) -> list[str]:
    """The packages with more lines than their budget, or without a budget."""
    return [
        f"{package}: {lines} lines, budget {BUDGETS.get(package, 0)}"
        for package, lines in lines_by_package(files).items()
        if lines > BUDGETS.get(package, 0)
    ]


def functions_in(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(text) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """The statements after the docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def single_use_helpers(files: Sources) -> list[str]:
    """Private functions of at most four lines that their module calls in one place, and uses nowhere else."""
    helpers = []
    for name, text in files.items():
        uses, calls = Counter[str](), Counter[str]()
        for node in nodes(text):
            if isinstance(node, ast.Name | ast.Attribute):
                uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                calls[node.func.id if isinstance(node.func, ast.Name) else node.func.attr] += 1
        helpers += [
            f"{name}:{function.lineno} {function.name}"
            for function in functions_in(text)
            if function.name.startswith("_") and not function.name.endswith("__")
            if uses[function.name] == calls[function.name] == 1 and not function.decorator_list
            if (body := body_of(function)) and function.end_lineno - body[0].lineno < 4
        ]
    return helpers


def forwards(files: Sources) -> list[str]:
    """Functions that only call another one with their own parameters, and properties of another's field."""
    hits = []
    for name, text in files.items():
        for function in functions_in(text):
            body = body_of(function)
            value = getattr(body[0], "value", None) if len(body) == 1 else None
            value = value.value if isinstance(value, ast.Await) else value
            own = [x.arg for x in (*function.args.posonlyargs, *function.args.args) if x.arg != "self"]
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.keywords:
                is_forward = is_chain(value.func) and [ast.unparse(x) for x in value.args] == own
            else:
                is_property = any(ast.unparse(x) == "property" for x in function.decorator_list)
                is_forward = is_property and isinstance(value, ast.Attribute) and is_chain(value)
            if is_forward:
                hits.append(f"{name}:{function.lineno} {function.name}")
    return hits


def is_chain(node: ast.Attribute) -> bool:
    """Whether an expression is a field of a field of ``self``."""
    return re.fullmatch(r"self\.\w+(\.\w+)+", ast.unparse(node)) is not None


def per_1000_lines(count: int) -> float:
    return round(1000 * count / lines_of(sources()), 2)


def lines_per_function() -> float:
    return round(lines_of(sources()) / sum(len(functions_in(text)) for text in sources().values()), 2)


def settings() -> list[str]:
    """The fields of ``Settings``: each is a variable of the environment."""
    classes = (x for x in nodes(sources()["fabric/runtime/config.py"]) if isinstance(x, ast.ClassDef))
    return sorted(own_attributes(next(x for x in classes if x.name == "Settings")))


def calls_of(word: str) -> list[ast.Call]:
    """The calls in fabric/ of a function with this name."""
    return [
        node
        for text in sources().values()
        for node in nodes(text)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == word
    ]


def first_commands() -> list[str]:
    return [ast.unparse(x.args[0]) for x in calls_of("_Command") if any(k.arg == "first" for k in x.keywords)]


def flags() -> set[tuple[str, str | None]]:
    """The flags and arguments of all commands as they run, each text once, however the code makes them."""

    def of(command: click.Command) -> Iterator[tuple[str, str | None]]:
        for given in command.params:
            is_flag = isinstance(given, click.Option)
            yield (given.opts[0], given.help) if is_flag else (command.name or "", given.name)
        for below in command.commands.values() if isinstance(command, click.Group) else ():
            yield from of(below)

    commands = [cli.get_command(click.Context(cli), name) for group in _GROUPS.values() for name in group]
    return {x for command in commands if command is not None for x in of(command)}


# --- the counts -------------------------------------------------------------------------------------------


def largest(counts: Mapping[str, int]) -> int:
    return max((n for name, n in counts.items() if name.split(":")[-1] not in FLAT_VALUES), default=0)


COUNTS: dict[str, Callable[[], float]] = {
    "most files in one folder": lambda: max(files_per_folder(sources()).values()),
    "class names in more than one file": lambda: len(homonyms(sources())),
    "most attributes of one class": lambda: largest(attributes(sources())),
    "classes with more than 20 attributes": lambda: len(large_classes(sources())),
    "parameters that are tuples of unlike things": lambda: len(mixed_tuples(sources())),
    "sentences that begin with a headless who or what": lambda: len(headless(sources())),
    "locals with a vague name": lambda: len(vague_locals(sources())),
    "writes of a shell into a core": lambda: len(core_writes(sources())),
    "writes of a part of a core into another part": lambda: len(foreign_writes(sources())),
    "banned phrases in docstrings and comments": lambda: len(banned(sources())),
    "banned phrases in pages": lambda: len(banned(pages())),
    "lines of fabric/": lambda: lines_of(sources()),
    "files of fabric/": lambda: len(sources()),
    "packages over their budget of lines": lambda: len(over_budget(sources())),
    "single-use helpers of at most four lines, per 1,000 lines": lambda: per_1000_lines(
        len(single_use_helpers(sources()))
    ),
    "functions that only forward": lambda: len(forwards(sources())),
    "settings": lambda: len(settings()),
    "flags and arguments of commands": lambda: len(flags()),
    "commands in the first help": lambda: len(first_commands()),
}
# Counts that may only rise.
FLOORS: dict[str, Callable[[], float]] = {"lines of fabric/ per function": lines_per_function}


@pytest.mark.parametrize("count", COUNTS)
def test_a_count_may_only_fall(count):
    value = COUNTS[count]()
    assert value <= LIMITS[count], (
        f"{count}: {value}, and {LIMITS[count]} is the limit; `python tests/test_ratchets.py` lists them"
    )


@pytest.mark.parametrize("count", FLOORS)
def test_a_floor_may_only_rise(count):
    assert FLOORS[count]() >= LIMITS[count]


def test_every_limit_has_a_count():
    assert set(LIMITS) == {*COUNTS, *FLOORS}
    assert set(BUDGETS) == set(lines_by_package(sources()))


def test_every_exception_is_needed():
    sizes = {name.split(":")[1]: count for name, count in attributes(sources()).items()}
    assert [name for name in FLAT_VALUES if sizes.get(name, 0) <= MAX_ATTRIBUTES] == []


CORE = {f"{CORE_FOLDERS[0]}a.py": "class Part:\n def forget(self): self.x = 1"}
CLASS = "class A:\n    def __init__(self):\n"
PLANTED = {
    "two files define one class": (homonyms, {"a.py": "class A: ...", "b.py": "class A: ..."}),
    "a class inherits too many attributes": (
        large_classes,
        {
            "a.py": CLASS + "".join(f"        self.a{i} = 0\n" for i in range(15)),
            "b.py": "from a import A\nclass B(A):\n" + "".join(f"    b{i}: int\n" for i in range(6)),
        },
    ),
    "a parameter is a tuple of unlike things": (mixed_tuples, {"a.py": "def f(a: tuple[int, str]): ..."}),
    "an alias hides the tuple": (mixed_tuples, {"a.py": "K = tuple[int, str]\ndef f(a: 'K | None'): ..."}),
    "a docstring begins with who": (headless, {"a.py": '"""A page. Who reads it knows."""'}),
    "a comment begins with what, after a line end": (headless, {"a.py": "# One thing.\n# What it is not."}),
    "a local is called found": (vague_locals, {"a.py": "for found in (): pass"}),
    "a parameter is called told": (vague_locals, {"a.py": "def f(told): ..."}),
    "a shell writes its core": (
        core_writes,
        {**CORE, "fabric/a.py": "class A:\n def f(self):\n  self.x = LeaderCore()\n  self.x.parts.y = 1"},
    ),
    "a shell changes an entry by another name": (
        core_writes,
        {
            **CORE,
            "fabric/a.py": "def f(x: LeaderCore):\n for p in x.state.peers.values():\n  p.seen = 1",
        },
    ),
    "a module writes into the core of another module's class": (
        core_writes,
        {
            **CORE,
            "fabric/a.py": "class A:\n def f(self): self.x = LeaderCore()",
            "fabric/b.py": "def g(job): job.x.state.y = 1",
        },
    ),
    "a shell empties a table of a core": (
        core_writes,
        {**CORE, "fabric/a.py": "def f(member: MemberCore):\n x, y = member.parts.rows, 1\n x.clear()"},
    ),
    "a shell commands a part of a core": (
        core_writes,
        {**CORE, "fabric/a.py": "def f(member: MemberCore): member.parts.forget()"},
    ),
    "a part writes into another part": (
        foreign_writes,
        {
            **CORE,
            f"{CORE_FOLDERS[0]}b.py": (
                "class B:\n def __init__(self, a: Part): self.a = a\n def f(self): self.a.x = 1"
            ),
        },
    ),
    "a dataclass writes into a part that it was given": (
        foreign_writes,
        {
            **CORE,
            f"{CORE_FOLDERS[0]}b.py": (
                "@dataclass\nclass B:\n a: Part\n def f(self):\n  x = self.a.rows\n  x[1] = 2"
            ),
        },
    ),
    "a package has more lines than its budget": (over_budget, {"fabric/unheard/a.py": "x = 1"}),
    "a helper of one line has one caller": (
        single_use_helpers,
        {"a.py": "def f(): return _g()\ndef _g(): return 1"},
    ),
    "a method only forwards its arguments": (
        forwards,
        {"a.py": "class A:\n def f(self, a, b): return self.x.y.f(a, b)"},
    ),
    "a property only forwards": (
        forwards,
        {"a.py": "class A:\n @property\n def f(self): return self._core.x"},
    ),
    "a docstring has a banned phrase": (banned, {"a.py": '"""It starts by itself."""'}),
    "a page has a banned phrase": (banned, {"a.md": "This is no stop."}),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_count_notices_a_planted_fault(fault):
    count, files = PLANTED[fault]
    assert len(count(files)) == 1


CLEAN = {
    "fabric/a.py": '''"""What is it? The page is no longer here. It is nobody's."""
class A(B):
    x: int
    def f(self, a: tuple[int, ...], b: tuple[int, int], core: LeaderCore):
        self.x = core.handle(a)
        self.y = [core.parts.rows.get(1)]
        self.y.append(core.parts.x)
''',
    **CORE,
    "fabric/b.py": "class B: ...",
}


@pytest.mark.parametrize(
    "count",
    [
        homonyms,
        large_classes,
        mixed_tuples,
        headless,
        vague_locals,
        core_writes,
        foreign_writes,
        forwards,
        banned,
    ],
)
def test_a_count_passes_what_is_allowed(count):
    assert not count(CLEAN)


def main() -> None:
    for count, measure in {**COUNTS, **FLOORS}.items():
        print(f"{measure():7}  (limit {LIMITS[count]})  {count}")
    for package, lines in sorted(lines_by_package(sources()).items()):
        print(f"{lines:7}  (budget {BUDGETS.get(package)})  lines of {package}")
    classes = sum(isinstance(n, ast.ClassDef) for t in sources().values() for n in nodes(t))
    places = sum(map(len, homonyms(sources()).values()))
    words = sum(len(block.split()) for text in sources().values() for block in prose(text))
    print(f"{100 * places / classes:7.1f}  % of {classes} classes share their name with one in another file")
    print(f"{1000 * len(headless(sources())) / words:7.2f}  headless openers per 1,000 of {words} words")
    print(f"{1000 * len(vague_locals(sources())) / lines_of(sources()):7.2f}  vague locals per 1,000 lines")
    print("\nclasses over the limit:", large_classes(sources()))
    for title, hits in (
        ("homonyms", [f"{name}: {', '.join(sorted(where))}" for name, where in homonyms(sources()).items()]),
        ("tuples of unlike things", mixed_tuples(sources())),
        ("writes into cores", core_writes(sources())),
        ("writes between parts of cores", foreign_writes(sources())),
        ("single-use helpers", single_use_helpers(sources())),
        ("functions that only forward", forwards(sources())),
        ("headless openers", headless(sources())),
        ("vague locals", vague_locals(sources())),
        ("banned phrases", banned(sources()) + banned(pages())),
    ):
        print(f"\n{title}:", *hits, sep="\n  ")


if __name__ == "__main__":
    main()
