"""The lighthouse asks a slow replica and one witness for a micro-benchmark, and says what it has shown."""

import math

import pytest

from fabric.health.localise import Scope, Slowdown, Unit
from fabric.lighthouse.diagnosis.speed_checks import ANSWER_S, MOST_PER_HOUR, SpeedChecks
from fabric.model import SpeedMeasurement
from fabric.protocol.messages.network import HeartbeatAck

MEMBERS = ("r0", "r1", "r2", "r3")
NOW = 1_000_000.0


def slow(name: str = "r1", factor: float = 2.0, scope: Scope = Scope.REPLICA) -> dict[str, Slowdown]:
    return {name: Slowdown(scope, (Unit(name),), factor, "evidence")}


def asked(checks: SpeedChecks) -> dict[str, int]:
    """The number of the request that each member gets with its next heartbeat."""
    numbers = {name: checks.attach(name, HeartbeatAck(5)).measure for name in MEMBERS}
    return {name: number for name, number in numbers.items() if number}


def begun(**more) -> tuple[SpeedChecks, int]:
    checks = SpeedChecks()
    assert checks.look(slow(**more), {}, MEMBERS, NOW) == []
    return checks, asked(checks)["r1"]


def answer(number: int, product_s: float, copy_s: float = 0.001, rank: int = 0) -> SpeedMeasurement:
    return SpeedMeasurement(number, rank, product_s, copy_s)


def test_only_the_suspect_and_one_witness_are_asked():
    checks, _ = begun()
    assert set(asked(checks)) == {"r1", "r0"}


def test_no_member_is_asked_while_none_is_slow():
    checks = SpeedChecks()
    assert checks.look({}, {}, MEMBERS, NOW) == [] and asked(checks) == {}
    message = HeartbeatAck(1, "nothing")
    assert checks.attach("r1", message) is message


def test_a_slow_device_is_confirmed():
    checks, number = begun()
    checks.take("r1", [answer(number, 0.020)])
    assert asked(checks) == {"r0": number}, "r1 has answered"
    checks.take("r0", [answer(number, 0.010)])
    (verdict,) = checks.look(slow(), {}, MEMBERS, NOW + 1)
    assert (verdict.replica, verdict.verdict) == ("r1", "confirmed")
    assert "a matrix product takes 20 ms there and 10 ms at r0" in verdict.why
    assert asked(checks) == {}


def test_a_device_as_fast_as_the_witness_refutes_it():
    checks, number = begun()
    checks.take("r1", [answer(number, 0.0104)])
    checks.take("r0", [answer(number, 0.010)])
    (verdict,) = checks.look(slow(), {}, MEMBERS, NOW + 1)
    assert verdict.verdict == "refuted" and "look at its data and at its host" in verdict.why


def test_slow_memory_confirms_it_too():
    checks, number = begun()
    checks.take("r1", [answer(number, 0.010, copy_s=0.004)])
    checks.take("r0", [answer(number, 0.010, copy_s=0.002)])
    (verdict,) = checks.look(slow(), {}, MEMBERS, NOW + 1)
    assert verdict.verdict == "confirmed"


def test_figures_that_contradict_each_other_confirm_nothing():
    checks, number = begun()
    checks.take("r1", [answer(number, 0.005, copy_s=0.004)])
    checks.take("r0", [answer(number, 0.015, copy_s=0.002)])
    (verdict,) = checks.look(slow(), {}, MEMBERS, NOW + 1)
    assert verdict.verdict == "no answer" and verdict.why.endswith("contradict each other")


@pytest.mark.parametrize("bad", [math.nan, -1.0, 0.0, math.inf])
@pytest.mark.parametrize("asked_name", ["r1", "r0"])
def test_an_impossible_time_confirms_nothing(bad, asked_name):
    checks, number = begun()
    for name in ("r1", "r0"):
        checks.take(name, [answer(number, bad if name == asked_name else 0.01, copy_s=bad)])
    (verdict,) = checks.look(slow(), {}, MEMBERS, NOW + 1)
    assert verdict.verdict == "no answer"


def test_a_replica_that_is_no_longer_slow_gets_no_verdict():
    checks, number = begun()
    checks.take("r1", [answer(number, 0.020)])
    assert checks.look({}, {}, MEMBERS, NOW + 1) == [] and asked(checks) == {}
    checks.take("r0", [answer(number, 0.010)])
    assert checks.look(slow(), {}, MEMBERS, NOW + 2) == []
    assert asked(checks)["r1"] > number, "a new slowdown gets a new check"


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "confirmed"), (4.0, "refuted")])
def test_the_measurement_must_show_half_of_the_slowdown(factor, verdict):
    checks, number = begun(factor=factor)
    checks.take("r1", [answer(number, 0.013)])
    checks.take("r0", [answer(number, 0.010)])
    (found,) = checks.look(slow(factor=factor), {}, MEMBERS, NOW + 1)
    assert found.verdict == verdict


def test_only_the_suspected_rank_is_judged():
    checks = SpeedChecks()
    checks.look(slow(scope=Scope.RANK), {"r1": (1,)}, MEMBERS, NOW)
    number = asked(checks)["r1"]
    checks.take("r1", [answer(number, 0.030, rank=0), answer(number, 0.010, rank=1)])
    checks.take("r0", [answer(number, 0.010, rank=0), answer(number, 0.010, rank=1)])
    (verdict,) = checks.look(slow(scope=Scope.RANK), {}, MEMBERS, NOW + 1)
    assert verdict.verdict == "refuted"


def test_a_replica_that_does_not_answer_ends_the_check():
    checks, number = begun()
    checks.take("r0", [answer(number, 0.010)])
    assert checks.look(slow(), {}, MEMBERS, NOW + ANSWER_S / 2) == []
    (verdict,) = checks.look(slow(), {}, MEMBERS, NOW + ANSWER_S)
    assert verdict.verdict == "no answer" and "r1 has not answered" in verdict.why


def test_a_check_of_a_replica_that_has_left_ends_at_once():
    checks, number = begun()
    checks.take("r0", [answer(number, 0.010)])
    (verdict,) = checks.look({}, {}, ("r0", "r2", "r3"), NOW + 1)
    assert (verdict.replica, verdict.verdict) == ("r1", "no answer") and "r1 has left the job" in verdict.why


def test_a_replica_that_has_answered_and_left_is_judged():
    checks, number = begun()
    for name in ("r0", "r1"):
        checks.take(name, [answer(number, 0.010)])
    (verdict,) = checks.look({}, {}, ("r2", "r3"), NOW + 1)
    assert verdict.verdict == "refuted"


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_failed_measurements_are_no_answer(bad):
    checks, number = begun()
    for name in ("r0", "r1"):
        checks.take(name, [answer(number, bad, copy_s=bad)])
    (verdict,) = checks.look(slow(), {}, MEMBERS, NOW + 1)
    assert verdict.verdict == "no answer" and "failed" in verdict.why


def test_answers_to_no_request_do_not_count():
    checks, number = begun()
    checks.take("r1", [answer(number - 1, 0.020)])
    checks.take("r3", [answer(number, 0.020)])
    checks.take("r1", [])
    assert set(asked(checks)) == {"r0", "r1"}


def test_a_slowdown_is_checked_once_until_it_has_ended():
    checks, number = begun()
    for name in ("r0", "r1"):
        checks.take(name, [answer(number, 0.010)])
    checks.look(slow(), {}, MEMBERS, NOW + 1)
    checks.look(slow(), {}, MEMBERS, NOW + 2)
    assert asked(checks) == {}
    checks.look({}, {}, MEMBERS, NOW + 3)
    checks.look(slow(), {}, MEMBERS, NOW + 4)
    assert asked(checks)["r1"] > number


def test_checks_have_a_budget_per_hour():
    checks, begun_checks = SpeedChecks(), 0
    for n in range(3 * MOST_PER_HOUR):
        at = NOW + n * 2 * ANSWER_S
        checks.look(slow(), {}, MEMBERS, at)
        begun_checks += bool(asked(checks))
        checks.look({}, {}, MEMBERS, at + ANSWER_S)
    assert begun_checks == MOST_PER_HOUR
    checks.look(slow(), {}, MEMBERS, NOW + 2 * 3600)
    assert asked(checks)


def test_a_slow_job_or_many_slow_replicas_are_not_checked():
    checks = SpeedChecks()
    checks.look({"": Slowdown(Scope.JOB, (), 2.0, "all")}, {}, MEMBERS, NOW)
    assert asked(checks) == {}
    checks.look(slow("r0") | slow("r1") | slow("r2"), {}, MEMBERS, NOW)
    assert asked(checks) == {}
    checks.look(slow("r0"), {}, ("r0",), NOW)
    assert asked(checks) == {}, "no witness is left"


def test_the_work_of_a_look_does_not_grow_with_the_members_that_are_well():
    """A job of ten thousand members: the witness is the first healthy member."""

    class Counted(list):
        seen = 0

        def __iter__(self):
            for x in super().__iter__():
                Counted.seen += 1
                yield x

    members = Counted(f"m{n}" for n in range(10_000))
    checks = SpeedChecks()
    checks.look({}, {}, members, NOW)
    checks.look(slow("m1"), {}, members, NOW)
    assert Counted.seen <= 4


# --- links between replicas -------------------------------------------------------------------------------


def slow_link(a: str = "r1", b: str = "r2") -> dict[str, Slowdown]:
    return {a: Slowdown(Scope.LINK, (Unit(a), Unit(b)), 9.0, "evidence")}


def echoes(checks: SpeedChecks) -> dict[str, str]:
    """The member that each asked member echoes."""
    answers = {name: checks.attach(name, HeartbeatAck(5)) for name in MEMBERS}
    return {name: message.echo for name, message in answers.items() if message.measure}


def echo(number: int, round_trip_s: float, bytes_per_s: float) -> SpeedMeasurement:
    return SpeedMeasurement(number, round_trip_s=round_trip_s, bytes_per_s=bytes_per_s)


def checked_link(own: SpeedMeasurement, reference: SpeedMeasurement, checks: SpeedChecks):
    checks.take("r1", [own])
    checks.take("r3", [reference])
    (verdict,) = checks.look(slow_link(), {}, MEMBERS, NOW + 1)
    assert verdict.replica == "r1" and verdict.is_about_link and asked(checks) == {}
    return verdict


@pytest.mark.parametrize(
    ("bytes_per_s", "verdict"), [(2e6, "confirmed"), (700e6, "refuted"), (-1.0, "no answer")]
)
def test_the_sender_of_a_slow_link_and_one_witness_echo_the_next_members(bytes_per_s, verdict):
    checks = SpeedChecks()
    checks.look(slow_link(), {}, MEMBERS, NOW)
    assert echoes(checks) == {"r1": "r2", "r3": "r0"}
    number = asked(checks)["r1"]
    found = checked_link(echo(number, 0.001, bytes_per_s), echo(number, 0.001, 900e6), checks)
    assert found.verdict == verdict


def test_an_older_version_that_measures_its_device_instead_gives_no_answer():
    checks = SpeedChecks()
    checks.look(slow_link(), {}, MEMBERS, NOW)
    number = asked(checks)["r1"]
    assert checked_link(answer(number, 0.01), echo(number, 0.001, 900e6), checks).verdict == "no answer"


def test_a_replica_that_dies_in_its_echo_ends_the_check():
    checks = SpeedChecks()
    checks.look(slow_link(), {}, MEMBERS, NOW)
    checks.take("r3", [echo(asked(checks)["r3"], 0.001, 900e6)])
    (verdict,) = checks.look(slow_link(), {}, MEMBERS, NOW + ANSWER_S)
    assert verdict.verdict == "no answer" and verdict.is_about_link and "r1 has not answered" in verdict.why


def test_a_slow_device_is_checked_without_an_echo():
    checks, _ = begun()
    assert echoes(checks) == {"r0": "", "r1": ""}


def test_a_link_inside_a_replica_is_checked_as_its_devices_are():
    checks = SpeedChecks()
    inside = Slowdown(Scope.LINK, (Unit("r1", 0, 0), Unit("r1", 0, 1)), 2.0, "evidence")
    checks.look({"r1": inside}, {}, MEMBERS, NOW)
    assert echoes(checks) == {"r0": "", "r1": ""}


def test_a_link_is_checked_although_its_sender_was_checked_for_its_device():
    checks, number = begun()
    for name in ("r0", "r1"):
        checks.take(name, [answer(number, 0.010)])
    checks.look(slow_link(), {}, MEMBERS, NOW + 1)
    assert echoes(checks) == {"r1": "r2", "r3": "r0"}
    number = asked(checks)["r1"]
    for name in ("r1", "r3"):
        checks.take(name, [echo(number, 0.001, 900e6)])
    checks.look(slow_link(), {}, MEMBERS, NOW + 2)
    checks.look(slow_link(), {}, MEMBERS, NOW + 3)
    assert asked(checks) == {}, "each is checked once"
