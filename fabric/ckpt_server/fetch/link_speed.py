"""Decides whether a fetch compresses its bytes, from the link speed measured during the fetch.

A fetch begins plain. A link that is faster than compression stays plain. On a slower link one range is tried
compressed. After that range the fetch uses the faster way (plain or compressed), and tries the other from
time to time. The module has no clock and no sockets; any thread may use it.
"""

import threading

# On a faster link compression gains nothing: one thread compresses no faster on the machines that we know.
FAST_BYTES_S = 400e6
# Compression takes processor time on two hosts, so it must multiply the speed by this factor.
GAIN = 1.1
_FIRST_PLAIN = 2  # uncompressed first ranges per stream: a connection's first bytes come slowly
_LOOK_AGAIN = 32  # ranges sent in the chosen way (plain or compressed) before one range tries the other way
_MIN_BYTES = 1 << 20  # a smaller range measures the request's duration, not the link's speed


class LinkSpeed:
    """The measurements of ``streams`` streams together; ``why`` explains the decision."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._plain_ranges = 0
        self._plain = 0.0  # bytes per second of one stream, measured on the last plain ranges
        self._compressed = 0.0
        self._trial: bool | None = None  # whether the range on trial is compressed; None: no trial
        self._since = 0

    def compress_next(self) -> bool:
        """Return whether to compress the next range. The caller must then call ``measured`` or ``failed``."""
        with self._lock:
            if not self._is_known or self._is_fast:
                return False
            if self._trial is not None or (self._compressed and self._since < _LOOK_AGAIN):
                self._since += 1
                return self._chosen
            self._trial, self._since = not self._chosen, 0
            return self._trial

    def measured(self, compressed: bool, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` of the state arrived and were decompressed in ``seconds`` on one stream."""
        rate = nbytes / max(seconds, 1e-9)
        with self._lock:
            if compressed == self._trial:
                self._trial = None
            if nbytes < _MIN_BYTES:
                return
            if compressed:
                self._compressed = rate
            else:
                self._plain = rate if not self._plain else (self._plain + rate) / 2
                self._plain_ranges += 1

    def failed(self, compressed: bool) -> None:
        """Note that the range failed, for a reason other than the link's speed."""
        with self._lock:
            if compressed == self._trial:
                self._trial = None

    @property
    def why(self) -> str:
        """The last decision, and its reason."""
        with self._lock:
            plain = f"{self._plain * self._streams / 1e6:.0f} MB/s"
            compressed = f"{self._compressed * self._streams / 1e6:.0f} MB/s"
            if not self._is_known:
                return "plain: too little was fetched to measure the link"
            if self._is_fast:
                return f"plain: the link gives {plain}, faster than compressing"
            if not self._compressed:
                return f"plain: the link gives {plain}, and nothing was left to try compression with"
            chosen = "compressed" if self._chosen else "plain"
            return f"{chosen}: the link gives {plain} plain and {compressed} compressed"

    @property
    def _is_known(self) -> bool:
        return self._plain_ranges >= _FIRST_PLAIN * self._streams

    @property
    def _is_fast(self) -> bool:
        return self._plain * self._streams >= FAST_BYTES_S

    @property
    def _chosen(self) -> bool:
        return self._compressed > GAIN * self._plain
