"""A launcher offers layouts to its ranks, and rank 0 answers with an order."""

import os
import subprocess
import sys

import pytest

from fabric.errors import ConfigError
from fabric.runtime.rank_layout import (
    LayoutMemory,
    LayoutOffer,
    LayoutOrder,
    RankLayout,
    parse_layout,
    parse_order,
    read_offer,
    write_order,
)

OFFER = LayoutOffer(("ranks=4,tp=2", "ranks=2,tp=2"), ("ranks=4,layers=3+1",))


@pytest.fixture
def launched():
    layouts = LayoutMemory()
    yield layouts
    os.close(layouts.descriptor)


def test_a_rank_in_another_process_reads_the_offer_and_orders_a_layout(launched):
    launched.offer(OFFER)
    program = (
        "import sys; from fabric.runtime.rank_layout import *; number = int(sys.argv[1]);"
        "print(read_offer(number)); write_order(number, 'ranks=2,tp=2 without 1+3')"
    )
    rank = subprocess.run(
        [sys.executable, "-c", program, str(launched.descriptor)],
        pass_fds=[launched.descriptor],
        capture_output=True,
        text=True,
        check=True,
    )
    assert rank.stdout.strip() == str(OFFER)
    assert launched.take() == LayoutOrder(RankLayout(2, 2), (1, 3))


def test_the_next_offer_forgets_the_order_before(launched):
    launched.offer(OFFER)
    write_order(launched.descriptor, "ranks=2")
    launched.offer(OFFER)
    assert launched.take() is None and read_offer(launched.descriptor) == OFFER


@pytest.mark.parametrize("text", ["", "ranks=2 without x", "ranks=-1", "ranks=2 without 99999"])
def test_an_order_that_cannot_be_read_is_no_order(launched, text):
    launched.offer(OFFER)
    write_order(launched.descriptor, text)
    assert launched.take() is None


def test_another_file_is_neither_read_nor_written(tmp_path):
    path = tmp_path / "mine"
    path.write_text("a\nb\n")
    descriptor = os.open(path, os.O_RDWR)
    write_order(descriptor, "ranks=2")
    assert read_offer(descriptor) == LayoutOffer() == read_offer(-1) == read_offer(9_999)
    os.close(descriptor)
    assert path.read_text() == "a\nb\n"


@pytest.mark.parametrize("text", ["ranks=1 without 1", "ranks=4,layers=5+7", "ranks=2,tp=2 without 0+3"])
def test_an_order_is_written_as_it_is_read(text):
    assert str(parse_order(text)) == text
    with pytest.raises(ConfigError):
        parse_order(text + " without y")
    assert parse_layout(text.split()[0]) == parse_order(text).layout
