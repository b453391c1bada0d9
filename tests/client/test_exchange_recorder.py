"""The reader of torch's recordings also reads the recording of fabric's own exchange."""

from fabric.client.gradients.exchange_thread import ExchangeRecorder
from fabric.collectives.recording import Process, Recording, parse_recording


def read(recorder: ExchangeRecorder, epoch: int = 3) -> Recording:
    return parse_recording(recorder.to_json("r1", 2, epoch, ["r0", "r1"]), Process("", 0), "x")


def test_the_recording_tells_completed_aborted_and_running_rounds_apart():
    recorder = ExchangeRecorder()
    done = recorder.begin(3, 7, 1024, ("float32",))
    done.reduce_s = 0.25
    recorder.end(done)
    recorder.end(recorder.begin(3, 8, 1024, ("float32",)), "r0 is gone")
    recorder.begin(3, 8, 1024, ("float32",)).buckets = 2
    recording = read(recorder)
    assert (recording.process, recording.is_own, recording.is_partial) == (Process("r1", 2), True, False)
    assert recording.groups["epoch 3"].replicas == ("r0", "r1")
    first, aborted, under_way = recording.collectives
    assert (first.is_pending, first.duration_ms, first.number) == (False, 250.0, 7)
    assert (aborted.has_failed, aborted.note) == (True, "r0 is gone")
    assert (under_way.is_pending, under_way.note) == (True, "2 buckets are reduced")
    assert under_way.words == "the exchange of step 8" and under_way.shape_words == "1024 float32"


def test_the_newest_rounds_are_kept():
    recorder = ExchangeRecorder()
    for step in range(1200):
        recorder.end(recorder.begin(3, step, 8, ("float32",)))
    recording = read(recorder)
    assert recording.is_partial and [c.number for c in recording.collectives] == list(range(700, 1200))
