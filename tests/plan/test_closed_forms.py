"""The published formulas at their published values."""

import pytest
from papers.published import best_redundancy_closed_form, masked_failures_asymptotic

from fabric.plan import closed_forms as forms


def test_the_closed_forms_reproduce_the_published_values():
    assert masked_failures_asymptotic(200, 9) == pytest.approx(105.12, abs=0.005)
    assert forms.masked_failures_replication(200, 3) == pytest.approx(44.05, abs=0.005)
    assert forms.mean_overhead(200, 105.12) == pytest.approx(2.0286, abs=5e-5)
    interval_s = forms.optimal_interval(60, 31558, 3600)
    assert interval_s == pytest.approx(2114.9, abs=0.05)
    assert forms.availability(interval_s, 60, 31558, 3600) == pytest.approx(0.8467, abs=5e-5)
    assert forms.best_redundancy(200, save_s=60, restart_s=3600, mtbf_s=300).redundancy == 8
    assert best_redundancy_closed_form(200) == 8


def test_the_optimal_interval_is_the_best_of_its_neighbours():
    best_s = forms.optimal_interval(60, 31558, 3600)
    best = forms.availability(best_s, 60, 31558, 3600)
    assert all(forms.availability(best_s * f, 60, 31558, 3600) < best for f in (0.5, 0.9, 1.1, 2.0))


def test_the_series_comes_near_the_asymptotic_form_for_many_groups():
    ratio = forms.masked_failures(1000, 9) / masked_failures_asymptotic(1000, 9)
    assert 1.0 < ratio < 1.01


def test_the_depth_bound_rises_with_the_failures():
    assert [forms.stack_depth_bound(7, k) for k in range(7)] == [1, 2, 2, 2, 3, 4, 7]
