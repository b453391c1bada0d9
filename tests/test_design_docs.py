"""All pages together and docs/design are short, and docs/benchmarks.md has short cells."""

import re
from pathlib import Path

from fabric.protocol.member.state import TRANSITIONS

DOCS = Path(__file__).parent.parent / "docs"
NOTES = sorted((DOCS.parent / "benchmarks" / "notes").glob("*.md"))
MOST_WORDS = 120
MOST_WORDS_OF_A_CELL = 12
MOST_WORDS_OF_ALL_PAGES = 35_000  # README.md and docs/


def words(text: str) -> int:
    """Words as a reader sees them: without the targets of links."""
    shown = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(1 for word in shown.split() if re.search(r"\w", word))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def design_sections() -> dict[str, tuple[str, str]]:
    """``page.md#anchor`` -> (heading, text) of every heading of docs/design."""
    sections = {}
    for page in sorted((DOCS / "design").glob("*.md")):
        for section in page.read_text().split("\n## ")[1:]:
            heading, text = section.split("\n", 1)
            sections[f"{page.name}#{anchor(heading)}"] = (heading, text)
    return sections


def table_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, without the lines below the heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not re.fullmatch(r"-+", row[0])]


SECTIONS = design_sections()


# --- docs/design ------------------------------------------------------------------------------------------


def faults_of_a_section(text: str) -> list[str]:
    """Return what a section lacks, or has too much of."""
    links = re.findall(r"\[([^\]]+)\]\(\.\./\.\./([^)]+)\)", text)
    needed = {
        "at most 120 words": words(text) <= MOST_WORDS,
        "Why": re.search(r"\n\*\*Why:\*\* \w", text),
        "Price": re.search(r"\n\*\*Price:\*\* \w", text),
        "Code": re.search(r"\nCode: \[", text),
        "Tests": re.search(r"Tests:\s\[", text),
        "a link to code": any(re.match(r"(fabric|ops)/", target) for _, target in links),
        "a link to a test": any(target.startswith("tests/") for _, target in links),
        "links that show what they lead to": all(
            f"/{target}".endswith(f"/{shown}") for shown, target in links
        ),
    }
    return [part for part, is_there in needed.items() if not is_there]


def test_a_heading_is_short_and_gives_reason_price_code_and_test():
    faults = {place: faults_of_a_section(text) for place, (_, text) in SECTIONS.items()}
    assert {place: lacks for place, lacks in faults.items() if lacks} == {}


def test_each_missing_part_of_a_section_is_noticed():
    code = "Code: [x.py](../../fabric/x.py)"
    good = f"\n**Why:** a\n**Price:** b\n{code} Tests: [t](../../tests/t)"
    assert faults_of_a_section(good) == []
    assert faults_of_a_section("word " * 121) == [
        "at most 120 words",
        "Why",
        "Price",
        "Code",
        "Tests",
        "a link to code",
        "a link to a test",
    ]
    assert faults_of_a_section(good.replace("[x.py]", "[y.py]")) == ["links that show what they lead to"]


def test_the_word_counter_counts_words_of_markdown():
    assert words("One [link](../a/long path.md), and `two words` - here.") == 6


def test_the_number_of_words_of_all_pages_is_bounded():
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    assert sum(words(page.read_text()) for page in pages) <= MOST_WORDS_OF_ALL_PAGES


def test_the_number_of_headings_is_bounded():
    assert 22 <= len(SECTIONS) <= 38


# --- docs/benchmarks.md and benchmarks/notes --------------------------------------------------------------


def test_cells_of_the_benchmark_tables_are_short():
    rows = table_rows((DOCS / "benchmarks.md").read_text())
    assert len(rows) > 50
    for row in rows:
        for cell in row:
            assert words(cell) <= MOST_WORDS_OF_A_CELL, cell


def test_missed_targets_come_first_and_every_missed_figure_is_among_them():
    sections = (DOCS / "benchmarks.md").read_text().split("\n## ")
    assert sections[1].startswith("Missed targets\n")
    listed = {figure for row in table_rows(sections[1]) for figure in row[2].split(", ")}
    missed = set(re.findall(r"\*\*([\d.]+)\*\*", "".join(sections[2:])))
    assert missed == {figure for figure in listed if re.fullmatch(r"[\d.]+", figure)}


def headings(page: Path) -> list[str]:
    return re.findall(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)


def test_the_newest_note_comes_first():
    for page in (path for path in NOTES if path.name != "README.md"):
        dates = [re.match(r"20\d\d-\d\d-\d\d", heading) for heading in headings(page)]
        assert dates and all(dates), f"a heading of {page.name} begins without a date"
        days = [date[0] for date in dates if date]
        assert days == sorted(days, reverse=True), page.name


def test_the_page_of_notes_lists_all_notes():
    [index] = [path for path in NOTES if path.name == "README.md"]
    assert not headings(index)
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", index.read_text()))
    assert {path.name for path in NOTES} - {index.name} == linked


def test_the_picture_of_a_members_modes_is_the_table_in_the_code():
    page = (DOCS / "protocol.md").read_text()
    picture = page.split("stateDiagram-v2\n")[1].split("```")[0]
    drawn = {tuple(line.strip().split(" --> ")) for line in picture.splitlines() if line.strip()}
    assert drawn == {(mode.value, to.value) for mode, moves in TRANSITIONS.items() for to in moves}


def test_the_protocol_names_scenarios_that_exist():
    named = set(re.findall(r"`(\w+\.txt)`", (DOCS / "protocol.md").read_text()))
    there = {path.name for path in (DOCS.parent / "tests" / "protocol" / "scenarios").glob("*.txt")}
    assert named <= there and len(named) >= 11
