"""The diffs of docs/adopt/ are those of the examples that the tests run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Page, example, and the test's module that takes the changed lines back.
EXAMPLES = [
    ("accelerate", "accelerate_loop", "plain_examples"),
    ("transformers", "transformers_trainer", "plain_examples"),
    ("torchft", "torchft_ddp", "test_torchft_scripts"),
]


def diff(page: str) -> tuple[list[str], list[str]]:
    """Return the lines that the page's diff takes away, and those that it adds."""
    [text] = re.findall(
        r"```diff\n(.*?)```", (ROOT / "docs/adopt" / f"{page}.md").read_text(), flags=re.DOTALL
    )
    lines = text.splitlines()
    return [x[1:] for x in lines if x[0] == "-"], [x[1:] for x in lines if x[0] == "+"]


@pytest.mark.parametrize(("page", "example", "module"), EXAMPLES)
def test_the_diff_is_that_of_the_example(page, example, module):
    removed, added = diff(page)
    text = (ROOT / "examples" / f"{example}.py").read_text().splitlines()
    assert all(text.count(line) == 1 for line in added)
    assert not any("fabric" in line for line in text[1:] if line not in added), "another line names fabric"
    taken_back = (ROOT / f"tests/integration/{module}.py").read_text().replace("\\n", "")
    assert all(f'"{line}"' in taken_back for line in removed + added), "the test runs another diff"


def test_the_added_lines_of_the_page_on_ray_are_in_the_example():
    _, added = diff("ray")
    text = (ROOT / "examples" / "ray_job.py").read_text().splitlines()
    assert added and all(text.count(line) == 1 for line in added)


def test_each_page_is_at_most_a_screen_and_in_the_table():
    table = (ROOT / "docs/adopt.md").read_text()
    pages = sorted((ROOT / "docs/adopt").glob("*.md"))
    assert pages
    assert {page.name for page in pages if len(page.read_text().splitlines()) > 55} == set()
    assert {page.name for page in pages if f"](adopt/{page.name})" not in table} == set()
