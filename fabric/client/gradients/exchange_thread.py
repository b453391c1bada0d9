"""The exchange thread: gathers the kept gradient into a slot, reduces it over the ring and digests it.

It does one round at a time, bucket by bucket. While it reduces the first buckets, backward may still compute
the gradients of later ones. A replica that is the only member waits for no peer, so its main thread does the
round, and no thread wakes another. As long as it has met no other replica, none can ask for the sum. Then the
sum stays in ``.grad``: it is neither copied nor digested.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import xxhash

from fabric.client.gradients.bucket_stream import BucketReadiness
from fabric.client.gradients.gradient_backend import GradientBackend, HostBackend
from fabric.client.gradients.gradient_slots import GradientSlots
from fabric.client.process.step_clock import StepClock
from fabric.client.process.worker import Worker
from fabric.errors import ConfigError, RoundAborted
from fabric.ftar.buckets import Bucket, FlatGradients
from fabric.ftar.device.cuda import CudaEvent
from fabric.ftar.lanes import LaneDirectory, LanePlane
from fabric.ftar.plane import DataPlane
from fabric.ftar.reduce_ops import Reduction
from fabric.model import StepTimes
from fabric.protocol.messages import member_events as io
from fabric.runtime.failpoints import Failpoints

_KEPT = 500
_WORDS = 200


@dataclass(slots=True)
class ExchangeEntry:
    """One round in the exchange thread. Times are Unix time in nanoseconds, 0 before the event."""

    epoch: int
    step: int
    nbytes: int
    dtypes: tuple[str, ...]
    created_ns: int
    buckets: int = 0  # number of buckets reduced so far
    reduce_s: float = 0.0  # time in the exchange, without waits for this process's backward pass
    ended_ns: int = 0
    aborted: str = ""  # why the round ended without a result

    def to_json(self, number: int) -> dict[str, object]:
        """Return the entry in the form of torch's Flight Recorder, with the fields that apply."""
        is_done = bool(self.ended_ns) and not self.aborted
        body: dict[str, object] = {
            "record_id": number,
            "process_group": [_group(self.epoch), "exchange"],
            "collective_seq_id": self.step,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "profiling_name": "fabric:all_reduce",
            "input_sizes": [[self.nbytes]],
            "input_dtypes": list(self.dtypes),
            "output_sizes": [[self.nbytes]],
            "output_dtypes": list(self.dtypes),
            "time_created_ns": self.created_ns,
            "time_discovered_completed_ns": self.ended_ns if is_done else 0,
            "state": "completed" if is_done else "started",
            "retired": bool(self.ended_ns),
            "note": self.aborted or ("" if is_done else f"{self.buckets} buckets are reduced"),
        }
        if is_done:
            body["duration_ms"] = 1e3 * self.reduce_s
        return body


@dataclass(slots=True)
class ExchangeRecorder:
    """The newest rounds; the exchange thread writes, and any thread reads.

    ``fabric diagnose`` compares the recordings of all members: which member entered which exchange, when, and
    how long the exchange took there. A round has one entry, so the cost does not grow with the gradient.
    """

    _entries: deque[ExchangeEntry] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _count: int = 0

    def begin(self, epoch: int, step: int, nbytes: int, dtypes: tuple[str, ...]) -> ExchangeEntry:
        """Record that a round begins; return its entry."""
        entry = ExchangeEntry(epoch, step, nbytes, dtypes, time.time_ns())
        self._entries.append(entry)
        self._count += 1
        return entry

    def end(self, entry: ExchangeEntry, aborted: str = "") -> None:
        """Record that a round has ended. ``aborted``: why it has no result."""
        entry.aborted = aborted[:_WORDS]
        entry.ended_ns = time.time_ns()

    def to_json(self, replica: str, rank: int, epoch: int, roster: Sequence[str]) -> dict[str, object]:
        """Return the whole recording. ``roster``: the members of ``epoch``."""
        entries = list(self._entries)
        first = max(0, self._count - len(entries))
        return {
            "recorder": "fabric",
            "replica": replica,
            "rank": rank,
            "pg_config": {_group(epoch): {"desc": "exchange", "ranks": list(roster)}},
            "entries": [entry.to_json(first + place) for place, entry in enumerate(entries)],
        }


def _group(epoch: int) -> str:
    return f"epoch {epoch}"


_EPOCHS = 16


class ExchangeThread:
    """Performs StartExchange; posts Exchanged or ExchangeFailed."""

    def __init__(
        self,
        plane: DataPlane,
        gradients: FlatGradients,
        slots: GradientSlots,
        points: Failpoints,
        on_crash: Callable[[BaseException], None],
        backend: GradientBackend,
        check_finite: bool = False,
        retain: bool = True,
    ) -> None:
        """``check_finite``: look for values that are not finite in every sum.

        ``retain``: keep the local gradient until the commit. On a device the gradient is always kept.
        """
        self.retain = retain or not isinstance(backend, HostBackend)
        self.backend = backend
        self.lanes: LaneDirectory | None = None  # set where replicas may have unequal layouts
        self.travels_as = "float32"  # see ``Reduction.exchange``
        self._check_finite = check_finite
        self._plane = plane
        self._gradients = gradients
        self._slots = slots
        self._points = points
        self._worker = Worker("fabric-exchange", on_crash)
        self._on_crash = on_crash
        self._round = threading.Lock()  # held during a round: an aborted round may end late
        self._newest: tuple[int, BucketReadiness | None] = (0, None)
        # The newest epochs in which all members take the values of this one's buffers; noted before a round.
        self.gives_in: deque[int] = deque(maxlen=_EPOCHS)
        self._dtypes = tuple(sorted({str(b.dtype).removeprefix("torch.") for b in gradients.buckets}))
        self.recorder = ExchangeRecorder()
        self._stayed: io.StartExchange | None = None  # the newest round, if its sum is in ``.grad`` alone
        self.seconds = 0.0
        self.waiting_s: dict[str, float] = {}
        self.sending_s: dict[str, float] = {}

    def start(
        self, order: io.StartExchange, stream: BucketReadiness | None, post: Callable[[io.Event], None]
    ) -> None:
        """Queue one round. With a ``stream``, wait for each bucket until it is final."""
        self._newest = (order.fence.epoch, stream)
        self._worker.submit(lambda: self._run(order, stream, post))

    def run_alone(
        self, order: io.StartExchange, post: Callable[[io.Event], None], wanted: bool = True
    ) -> None:
        """Do one round in this thread: for the main thread of the only member.

        ``wanted`` False: no replica can ask for the sum, so it stays in ``.grad`` where that is possible.
        """
        try:
            self._run(order, None, post, wanted)
        except Exception as error:  # noqa: BLE001  (ends the process as an error of the exchange thread does)
            self._on_crash(error)

    def stays(self, step: int) -> bool:
        """Whether the sum of the newest round, that of ``step``, is in ``.grad`` alone, not yet divided."""
        return self._stayed is not None and self._stayed.step == step

    def move(self) -> bool:
        """Copy such a sum to its slot after all, before it is divided; return whether the slot has it."""
        order = self._stayed
        with self._round:
            outcome = None if order is None else self._outcome(order, None, wanted=True)
        if order is None or not isinstance(outcome, io.Exchanged):
            self._stayed = order
            return False
        self._slots.find(order.step).bytes_digest = outcome.gradient_digest
        return True

    def take_times(self, clock: StepClock) -> StepTimes:
        """Return the times of the step that has just ended, and count those of the next one from zero."""
        times = clock.times(self.seconds, self.waiting_s, self.sending_s)
        self.seconds, self.waiting_s, self.sending_s = 0.0, {}, {}
        return times

    def abort(self, epoch: int, why: str) -> None:
        """End the round's wait for gradients that backward computes. The plane ends all other waits."""
        newest, stream = self._newest
        if stream is not None and newest <= epoch:
            stream.abort(epoch, why)

    def _run(
        self,
        order: io.StartExchange,
        stream: BucketReadiness | None,
        post: Callable[[io.Event], None],
        wanted: bool = True,
    ) -> None:
        with self._round:
            outcome = self._outcome(order, stream, wanted)
        post(outcome)

    def _outcome(self, order: io.StartExchange, stream: BucketReadiness | None, wanted: bool) -> io.Event:
        epoch, step = order.fence.epoch, order.step
        self._points.hit("before-ring", step)
        self._stayed = None
        lanes = self.lanes
        # Ranks of unequal layouts hold different parts of the model: record the size of the whole model.
        nbytes = self._gradients.nbytes if lanes is None else lanes.model_bytes
        entry = self.recorder.begin(epoch, step, nbytes, self._dtypes)
        if not wanted and order.weight > 0 and lanes is None and self._gradients.fragments == 1:
            self.recorder.end(entry)
            return self._stay(order)
        try:
            slot = self._slots.for_round(epoch, step)
            buffer = slot.buffer
            with self.backend.round(buffer) as flat:
                if lanes is None:
                    digest = self._exchange(order, stream, flat, entry)
                else:
                    digest = self._exchange_lanes(order, stream, flat, entry)
                    slot.bytes_digest = self.backend.digest()
                slot.absent = self._gradients.absent(flat)
                slot.copied = self.backend.copy_out(buffer)
                nonfinite = self._gradients.first_nonfinite(flat) if self._check_finite else ""
            self.recorder.end(entry)
        except RoundAborted as error:
            self.recorder.end(entry, str(error))
            lost = (error.about, str(error), error.waited_for, error.mismatch)
            return io.ExchangeFailed(epoch, step, *lost)
        except ConfigError as error:
            self.recorder.end(entry, str(error))
            # The user's gradient has a form that no data plane can sum.
            return io.LoopRaised(str(error))
        own_nonfinite = self._gradients.first_nonfinite_own() if nonfinite and order.weight > 0 else ""
        return io.Exchanged(epoch, step, digest, nonfinite, own_nonfinite)

    def _stay(self, order: io.StartExchange) -> io.Event:
        """End a round of the only member with the sum where it is: in ``.grad``."""
        epoch, step = order.fence.epoch, order.step
        try:
            for bucket in self._gradients.buckets:
                self._points.hit("gather", step, partial(lambda x: x, bucket))
                bucket.check_gradients()
        except ConfigError as error:
            return io.LoopRaised(str(error))
        self._stayed = order
        # Members compare digests. This one votes alone, so a name of the round takes the digest's place.
        name = xxhash.xxh3_128_hexdigest(f"{epoch} {step}".encode())
        nonfinite = self._gradients.first_nonfinite_own() if self._check_finite else ""
        return io.Exchanged(epoch, step, name, nonfinite, nonfinite)

    def _exchange(
        self,
        order: io.StartExchange,
        stream: BucketReadiness | None,
        flat: torch.Tensor,
        entry: ExchangeEntry,
    ) -> str:
        """Reduce all buckets in ``flat``, and return the digest of the result."""
        if order.weight == 0:
            self.backend.run(flat.zero_)
        for bucket in self._gradients.buckets:
            ready = stream.wait(bucket, order.fence.epoch) if stream is not None else None
            if self._gradients.is_exchanged(bucket, order.step):
                self._reduce(order, bucket, flat, entry, ready)
            else:
                self.backend.run(flat[bucket.gap : bucket.end].zero_, ready)
            self.backend.reduced(bucket)
        return self.backend.digest()

    def _exchange_lanes(
        self,
        order: io.StartExchange,
        stream: BucketReadiness | None,
        flat: torch.Tensor,
        entry: ExchangeEntry,
    ) -> str:
        """Reduce this rank's lanes; return the digest: the name of the layouts, then the sum of the lanes'
        digests. The sum over all ranks of a replica has each lane once."""
        plane, epoch, run = self._plane, order.fence.epoch, self.backend.run
        assert self.lanes is not None and isinstance(plane, LanePlane)
        if order.weight == 0:
            run(flat.zero_)
        for bucket in self._gradients.buckets if order.weight > 0 else ():
            ready = stream.wait(bucket, epoch) if stream is not None else None
            run(partial(self._gather, order, bucket, flat), ready)
            self._free(bucket)
        lanes = self.lanes.get(epoch)
        sections = lanes.rank_lanes.sections
        parts = [plane.memory(x) for x in sections]
        for section, part in zip(sections, parts, strict=True):
            # Gather all lanes before the first result is written: a piece with copies lies in several lanes.
            run(partial(lanes.rank_lanes.gather, section, flat, part))
        for section, part in zip(sections, parts, strict=True):
            with self._reducing(entry):
                how = Reduction(exchange=self.travels_as, coarse=section.coarse)
                plane.reduce_lane(section.lane, epoch, order.step, part, how)
            self.backend.digest_part(part, section.lane)
            run(partial(lanes.rank_lanes.scatter, section, part, flat))
        return f"{lanes.name}{self.backend.parts_digest():016x}"

    def _reduce(
        self,
        order: io.StartExchange,
        bucket: Bucket,
        flat: torch.Tensor,
        entry: ExchangeEntry,
        ready: tuple[CudaEvent, ...] | None,
    ) -> None:
        with self._reducing(entry):
            parts: list[torch.Tensor] = []
            if order.weight > 0:
                in_place = isinstance(self.backend, HostBackend)
                self.backend.run(lambda: parts.extend(self._gather(order, bucket, flat, in_place)), ready)
            # The result is stable: later rounds write to the slot only after two more commits, or after an
            # abort.
            self._plane.all_reduce(
                order.fence.epoch,
                order.step,
                parts or [bucket.view(flat)],
                bucket.view(flat),
                Reduction(exchange=self.travels_as, coarse=bucket.coarse),
                result_is_stable=True,
            )
            if order.weight > 0:
                self._free(bucket)

    @contextmanager
    def _reducing(self, entry: ExchangeEntry) -> Iterator[None]:
        """Count the time of a reduction, and add its times by peer to the step's."""
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.seconds += seconds
            entry.reduce_s += seconds
        entry.buckets += 1
        for peer, seconds in self._plane.waiting_s.items():
            self.waiting_s[peer] = self.waiting_s.get(peer, 0.0) + seconds
        for peer, seconds in self._plane.sending_s.items():
            self.sending_s[peer] = self.sending_s.get(peer, 0.0) + seconds

    def _gather(
        self, order: io.StartExchange, bucket: Bucket, flat: torch.Tensor, in_place: bool = False
    ) -> list[torch.Tensor]:
        self._points.hit("gather", order.step, lambda: bucket)
        is_one = order.fence.epoch in self.gives_in
        return self._gradients.gather_bucket(bucket, flat, is_one, in_place)

    def _free(self, bucket: Bucket) -> None:
        """Free the local gradients of a gathered bucket, unless they are kept until the commit."""
        for _, parameter in bucket.parameters if not self.retain else ():
            parameter.grad = None

    def close(self) -> None:
        self._worker.close(within_s=1.0)
