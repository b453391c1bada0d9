"""The published figures of four papers, and the command that prints them beside ours."""

import pytest
import reproduce
from click.testing import CliRunner
from papers import published


def test_closed_forms_and_the_published_table_are_reproduced():
    figures = list(published.closed_form_figures())
    assert all(figure.ok for figure in figures), [f for f in figures if not f.ok]
    assert len(figures) >= 10
    assert all(figure.ok for figure in published.torchpass_figures())


def test_a_figure_outside_its_tolerance_ends_with_exit_code_1(monkeypatch):
    def one(seeds, workers):
        return [published.Figure("a", "b", 1.0, 2.0, 0.5, False)]

    monkeypatch.setattr(reproduce, "reproduce", one)
    result = CliRunner().invoke(reproduce.main)
    assert result.exit_code == 1
    assert "OUTSIDE" in result.output


@pytest.mark.long("plan/test_engine.py")
def test_the_simulated_figures_of_the_smallest_size_are_reproduced():
    """All sizes with eight seeds take a minute: `benchmarks/reproduce.py` plays them. Three are --quick's."""
    figures = [f for f in published.reproduce(seeds=3, workers=2, groups=(200,)) if f.published is not None]
    assert not [f for f in figures if not f.ok]
    assert {"FT-HSDP, fixed arrivals, %", "SPARe, N = 200: time to train"} <= {f.id for f in figures}
    replication = next(f for f in figures if f.id == "replication, N = 200: time to train")
    assert 0.05 < replication.tolerance / replication.published < 0.09, "5 %, and the spread of three seeds"
