"""README and docs agree with the tree, the settings and the commands that they describe."""

import re
import tomllib
from pathlib import Path

import click
import pytest

from fabric.cli.main import cli
from fabric.runtime.config import Settings

ROOT = Path(__file__).parent.parent
NOTES = ROOT / "benchmarks" / "notes"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *NOTES.glob("*.md")])
# These variables are not for users; fabric/runtime/failpoints.py explains the failpoints.
NOT_DOCUMENTED = {
    "FABRIC_TEST_POINTS",
    "FABRIC_LAUNCH_STOP_S",  # tells a trainer how long its launcher waits after SIGTERM
    "FABRIC_LAUNCH_RESTARTS",  # tells the injector of a drill how often a launcher starts its process again
    "FABRIC_LAYOUT_ORDERS",  # tells a trainer the descriptor of its launcher's orders
    "FABRIC_STANDBY",  # tells a standby the socket to its launcher
    "FABRIC_LAUNCH_MARK",  # marks the processes of one launcher
    "FABRIC_GUARD_MARK",  # marks the processes that a demo or a drill started, so that it ends no others
}
NOT_A_PART = {"__pycache__"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchor(heading: str) -> str:
    """The fragment that a heading gets on the usual hosts."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def dead_link(page: Path, target: str) -> str:
    """Return what is wrong with a link of a page, or nothing."""
    path, _, fragment = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if not linked.exists():
        return "leads nowhere"
    if not linked.is_relative_to(ROOT):
        return "leads out of the project"
    headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE) if fragment else []
    return "names no heading" if fragment and fragment not in {anchor(h) for h in headings} else ""


def dead_links(page: Path) -> list[str]:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:", t)]
    return [f"{name(page)}: {target} {fault}" for target in targets if (fault := dead_link(page, target))]


def missing_paths(page: Path) -> list[str]:
    """`tests/...`, `fabric/...` and the like in backquotes; globs match something."""
    words = re.findall(r"`((?:fabric|tests|ops|docs|examples|benchmarks)/[\w./*-]*)`", page.read_text())
    return [f"{name(page)} names {word}" for word in words if not list(ROOT.glob(word.rstrip("/")))]


@pytest.mark.parametrize("rule", [dead_links, missing_paths])
def test_every_page_names_only_places_that_exist(rule):
    assert [fault for page in PAGES for fault in rule(page)] == []


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("no_such_page.md", "leads nowhere"),
        ("../outside.md", "leads out of the project"),
        ("README.md#no-such-heading", "names no heading"),
        ("README.md", ""),
    ],
)
def test_a_dead_link_is_noticed(target, fault, monkeypatch, tmp_path):
    page = tmp_path / "project" / "README.md"
    page.parent.mkdir()
    (tmp_path / "outside.md").touch()
    page.write_text(f"# A page\n[a link]({target}) and `tests/no_such_file.py`\n")
    monkeypatch.setitem(globals(), "ROOT", page.parent)
    assert dead_links(page) == ([f"README.md: {target} {fault}"] if fault else [])
    assert missing_paths(page) == ["README.md names tests/no_such_file.py"]


# --- settings --------------------------------------------------------------------------------------------


def variables() -> dict[str, object]:
    """Variable -> default, as the settings have it."""
    defaults = Settings()
    return {f"FABRIC_{name.upper()}": getattr(defaults, name) for name in Settings.__struct_fields__}


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = (ROOT / page).read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def settings_rows() -> list[list[str]]:
    """The cells of all tables of docs/settings.md, without their headings."""
    lines = (ROOT / "docs" / "settings.md").read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `FABRIC")
    ]


def documented() -> dict[str, str]:
    """Variable -> its default's cell in docs/settings.md."""
    found = {}
    for names, defaults, _ in settings_rows():
        listed = re.findall(r"`(FABRIC_\w+)`", names)
        cells = defaults.split(", ") if len(listed) > 1 else [defaults]
        assert len(cells) == len(listed), f"one default for each of {names}"
        found.update(zip(listed, cells, strict=True))
    return found


def test_every_setting_is_documented_and_no_other():
    assert set(documented()) == set(variables())


def test_defaults_are_as_documented():
    for variable, cell in documented().items():
        shown = re.fullmatch(r"`(.*)`", cell)
        default = variables()[variable]
        if shown is None:
            continue  # the default is a word: needed, none, the bound address
        whole = int(default) if isinstance(default, bool) else default
        expected = f"{whole:g}" if isinstance(whole, float) else str(whole)
        assert shown[1] == expected, f"{variable}: {cell}"


def mentioned() -> set[str]:
    everything = [p.read_text() for p in PAGES]
    everything += [p.read_text() for p in (ROOT / "examples").rglob("*") if p.suffix in (".py", ".sh", ".md")]
    return {word for text in everything for word in re.findall(r"\bFABRIC_[A-Z_]*[A-Z]\b", text)}


def test_no_page_names_a_setting_that_does_not_exist():
    assert mentioned() <= set(variables()) | NOT_DOCUMENTED


def test_sentences_of_the_source_name_settings_that_exist():
    known = set(variables()) | NOT_DOCUMENTED
    for path in (ROOT / "fabric").rglob("*.py"):
        for word in re.findall(r"\bFABRIC_[A-Z_]*[A-Z]\b", path.read_text()):
            assert word in known, f"{name(path)} says {word}"


# --- commands -----------------------------------------------------------------------------------------


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    found: dict[tuple[str, ...], click.Command] = {}
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        found[(*prefix, word)] = command
        if isinstance(command, click.Group):
            found.update(commands(command, (*prefix, word)))
    return found


COMMANDS = commands(cli)


def options(command: click.Command) -> set[str]:
    shown = {name for p in command.params if isinstance(p, click.Option) for name in p.opts}
    return shown | {"--help", "-h"}


def invocations(text: str) -> list[str]:
    """Every ``fabric ...`` of a page: in a block (continued lines joined) or in backquotes."""
    joined = text.replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", joined, flags=re.MULTILINE | re.DOTALL)
    typed = [block for kind, block in blocks if kind in ("", "sh", "bash")]
    lines = [line.strip() for block in typed for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", joined, flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"`([^`]+)`", prose)
    return [line for line in lines + quoted if re.match(r"(\.venv/bin/)?fabric +[a-z]", line)]


def described() -> list[tuple[str, str]]:
    return [(name(page), line) for page in PAGES for line in invocations(page.read_text())]


def test_pages_show_commands():
    lines = [line for _, line in described()]
    assert len(lines) > 5 and any(line.startswith("fabric lighthouse") for line in lines)


def unknown_parts(line: str) -> list[str]:
    """The command and the options of a shown line that ``fabric`` does not have."""
    # The words after -- are the command that a drill starts.
    words = line.partition(" -- ")[0].replace("[", " ").replace("]", " ").split()[1:]
    if tuple(words[:2]) != ("demo", "verify"):
        words = [words[0], *[w for w in words[1:] if w.startswith("-")]]
    key = tuple(words[:2]) if tuple(words[:2]) in COMMANDS else tuple(words[:1])
    if key not in COMMANDS:
        return [words[0]]
    if key == ("ckpt-server",):
        return []  # this command parses its own arguments
    given = [word.partition("=")[0] for word in words if word.startswith("-")]
    return [option for option in given if option not in options(COMMANDS[key])]


def test_commands_exist_with_their_options():
    faults = {f"{page} shows `{line}`": unknown_parts(line) for page, line in described()}
    assert {shown: parts for shown, parts in faults.items() if parts} == {}


def test_an_unknown_command_or_option_is_noticed():
    assert unknown_parts("fabric no-such-command --json") == ["no-such-command"]
    assert unknown_parts("fabric status --json --no-such-option=1 -- python train.py --own") == [
        "--no-such-option"
    ]


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE):
            assert target in targets, f"{name(page)} shows make {target}"


def test_commands_for_contributors_name_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    lines = [line.partition("#")[0].split() for line in re.findall(r"^\.venv/bin/(.*)$", page, flags=re.M)]
    assert len(lines) > 5
    for program, script, *_ in lines:
        assert program in ("pytest", "python") and (ROOT / script).is_file(), script


# --- folders --------------------------------------------------------------------------------------------


def folder_table() -> dict[str, str]:
    """Folder -> what it may import, from docs/architecture.md."""
    found = {}
    for names, _, imports in rows("docs/architecture.md", "Folders"):
        for word in re.findall(r"`([^`]+)`", names):
            found[word] = imports
    return found


def test_the_folder_table_names_every_folder():
    listed = {
        word.removeprefix("fabric/").rstrip("/") for word in folder_table() if word.startswith("fabric/")
    }
    there = {p.name for p in (ROOT / "fabric").iterdir() if p.is_dir() and p.name not in NOT_A_PART}
    files = {"model.py"}
    assert listed == there | files


def test_the_folder_table_names_only_what_exists():
    for word in folder_table():
        assert (ROOT / word).exists() or (ROOT / "fabric" / word).exists(), word


def test_the_table_and_the_import_contract_agree():
    """A part that may import another stands above it in pyproject.toml."""
    contract = (ROOT / "pyproject.toml").read_text().split("layers = [", 1)[1].split("]", 1)[0]
    layers = [set(re.findall(r"\w+", line)) for line in re.findall(r'"([^"]+)"', contract)]
    level = {part: i for i, parts in enumerate(layers) for part in parts}
    for word, imports in folder_table().items():
        part = word.removeprefix("fabric/").rstrip("/")
        for other in re.findall(r"\w+", imports):
            if part in level and other in level:
                assert level[other] > level[part], f"{word} is said to import {other}"


# --- rooms ------------------------------------------------------------------------------------------------

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
# Package -> its layers, the top one first; each is a set of rooms.
LAYERS = {
    contract["containers"][0].removeprefix("fabric."): [
        set(re.findall(r"\w+", layer)) for layer in contract["layers"]
    ]
    for contract in CONTRACTS
    if contract["type"] == "layers" and contract["containers"] != ["fabric"]
}
# The commands lie flat beside the rooms of cli/, one file each: `fabric --help` is their table.
FLAT = {"cli"}


def rooms() -> set[str]:
    """``package/room`` of each room in the table of docs/architecture.md."""
    return {
        package.strip("`") + room.removesuffix(".py").rstrip("/")
        for package, names in rows("docs/architecture.md", "Rooms")
        for room in re.findall(r"`([\w./]+)`", names)
    }


def rooms_of_the_tree() -> set[str]:
    folders = {
        f"{path.parent.name}/{path.name}"
        for path in (ROOT / "fabric").glob("*/*/")
        if path.name not in NOT_A_PART and list(path.glob("*.py"))
    }
    files = {
        f"{package}/{room}"
        for package, layers in LAYERS.items()
        if package not in FLAT
        for room in set().union(*layers)
    }
    return folders | files


def test_the_room_table_names_every_room():
    assert rooms() == rooms_of_the_tree()
