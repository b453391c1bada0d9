"""The prediction of times from work: what it learns, what it survives, and when it distrusts the work."""

import math
import random

import pytest

from fabric.health.detector import WARM_UP, WorkPredictor
from fabric.health.work import WorkAmount

HIDDEN = 4096


def attention_s(work: WorkAmount) -> float:
    """Full attention: per token 1, per pair of tokens 1 / (6 h)."""
    return work.tokens + work.squares / (6 * HIDDEN)


def packed(rng: random.Random, tokens: int = 8192) -> WorkAmount:
    lengths, left = [], tokens
    while left:
        lengths.append(min(left, 1 + int(rng.lognormvariate(math.log(900), 1.5))))
        left -= lengths[-1]
    return WorkAmount.of_documents(lengths)


def seconds(work: WorkAmount) -> float:
    return 1e-5 * attention_s(work) + 0.002 * work.micro_batches


def warmed_up(rng: random.Random, noise: float = 0.0, warm_up: int = WARM_UP) -> WorkPredictor:
    predictor = WorkPredictor(warm_up)
    work = packed(rng)
    while predictor.predict(work) is None:
        work = packed(rng, rng.choice((4096, 8192, 16384)))
        predictor.learn([(work, seconds(work) * rng.gauss(1, noise))])
    return predictor


# --- work -------------------------------------------------------------------------------------------------


def test_one_long_sequence_costs_four_times_the_attention_of_four_short_ones():
    long, short = WorkAmount.of_documents([4096]), WorkAmount.of_documents([1024] * 4)
    assert long.tokens == short.tokens
    assert long.squares == 4 * short.squares


def test_the_check_value_of_packing():
    long, short = WorkAmount.of_documents([8192]), WorkAmount.of_documents([2048] * 4)
    assert attention_s(long) / attention_s(short) == pytest.approx(1.2308, abs=5e-5)


def test_amounts_add_up():
    total = WorkAmount.total([WorkAmount.of_documents([3, 4], samples=2), WorkAmount(5.0, samples=1)])
    assert total == WorkAmount(12.0, 25.0, 3.0, 2)


# --- the fit ----------------------------------------------------------------------------------------------


def test_there_is_no_prediction_before_the_warm_up_ends():
    predictor, rng = WorkPredictor(), random.Random(1)
    for _ in range(WARM_UP - 1):
        work = packed(rng)
        predictor.learn([(work, seconds(work))])
    assert predictor.predict(packed(rng)) is None
    predictor.learn([(packed(rng), 0.1)])
    assert predictor.predict(packed(rng)) is not None


def test_exact_times_are_predicted_exactly_also_for_unseen_lengths():
    rng = random.Random(2)
    predictor = warmed_up(rng)
    for tokens in (1000, 8192, 40_000):
        work = packed(rng, tokens)
        assert predictor.predict(work) == pytest.approx(seconds(work), rel=1e-3)
    step = WorkAmount.total([packed(rng) for _ in range(4)])
    assert predictor.predict(step) == pytest.approx(seconds(step), rel=1e-3)


def test_outliers_in_the_warm_up_do_not_bend_the_fit():
    rng, predictor = random.Random(3), WorkPredictor()
    for number in range(WARM_UP):
        work = packed(rng)
        times = 5.0 if number % 6 == 0 else rng.gauss(1, 0.01)
        predictor.learn([(work, seconds(work) * times)])
    work = packed(rng)
    assert predictor.predict(work) == pytest.approx(seconds(work), rel=0.03)


def test_a_slow_drift_is_followed_and_an_outlier_is_not():
    rng = random.Random(4)
    predictor = warmed_up(rng, noise=0.01)
    for number in range(600):
        work = packed(rng)
        drift = 1 + 0.1 * min(1.0, number / 300)
        predictor.learn([(work, seconds(work) * drift * rng.gauss(1, 0.01))])
    work = packed(rng)
    before = predictor.predict(work)
    assert before == pytest.approx(1.1 * seconds(work), rel=0.02)
    predictor.learn([(work, 50 * seconds(work))])
    assert predictor.predict(work) == pytest.approx(before, rel=0.01)


def test_work_that_never_varies_keeps_its_prediction_for_a_thousand_steps():
    predictor, rng = WorkPredictor(), random.Random(5)
    work = WorkAmount(512.0, 0.0, 4.0, 4)
    for _ in range(1000):
        predictor.learn([(work, 0.1 * rng.gauss(1, 0.01))])
    assert predictor.predict(work) == pytest.approx(0.1, rel=0.01)
    half = WorkAmount(256.0, 0.0, 2.0, 2)
    assert predictor.predict(half) == pytest.approx(0.05, rel=0.02)


# --- work of no use ---------------------------------------------------------------------------------------


def test_work_that_does_not_explain_the_times_is_replaced_by_the_number_of_samples():
    rng, predictor = random.Random(7), WorkPredictor()
    for _ in range(WARM_UP):
        samples = rng.randrange(1, 9)
        work = WorkAmount(rng.uniform(1, 1000), 0.0, float(samples))
        predictor.learn([(work, 0.01 * samples * rng.gauss(1, 0.01))])
    assert "does not explain its times" in predictor.note
    assert predictor.note.endswith("the number of samples stands for it")
    for tokens in (1.0, 1e6):
        assert predictor.predict(WorkAmount(tokens, 0.0, 4.0)) == pytest.approx(0.04, rel=0.02)


def test_work_that_explains_the_times_is_kept():
    assert warmed_up(random.Random(8), noise=0.01).note == ""


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, math.inf])
def test_impossible_times_are_counted_and_dropped(bad):
    rng = random.Random(9)
    predictor = warmed_up(rng)
    work = packed(rng)
    before = predictor.predict(work)
    predictor.learn([(work, bad)])
    assert predictor.ignored == 1
    assert predictor.predict(work) == before
    empty = WorkPredictor(warm_up=4)
    for _ in range(10):
        empty.learn([(work, bad)])
    assert empty.predict(work) is None and empty.ignored == 10


@pytest.mark.parametrize(
    "bad", [WorkAmount(-1.0), WorkAmount(math.nan), WorkAmount(1.0, -1.0), WorkAmount(1.0, micro_batches=0)]
)
def test_impossible_work_is_dropped_and_not_predicted(bad):
    predictor = warmed_up(random.Random(10))
    predictor.learn([(bad, 0.1)])
    assert predictor.ignored == 1
    assert predictor.predict(bad) is None


def test_work_of_zero_is_the_fixed_cost_alone():
    predictor = WorkPredictor(warm_up=20)
    for _ in range(20):
        predictor.learn([(WorkAmount(0.0), 0.25)])
    assert predictor.predict(WorkAmount(0.0)) == pytest.approx(0.25, rel=1e-3)
