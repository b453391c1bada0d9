"""Copies the output of a rank to the launcher's own output and to a log."""

import contextlib
import os
import re
import select
from typing import IO

from fabric.model import printable, shortened

_READ_BYTES = 1 << 16
# A longer line is cut, so that a rank that never ends a line does not fill the launcher's memory.
_MAX_LINE_BYTES = 1 << 16
_LAST_CHARACTERS = 200
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class RankOutput:
    """Copies one stream of a rank: to ``terminal`` with a prefix before each line, to ``log`` as it is."""

    def __init__(self, source: int, prefix: str, terminal: int, log: IO[bytes] | None) -> None:
        self.source = source
        self._prefix, self.terminal, self._log = prefix.encode(), terminal, log
        self._pending = b""
        self._last = b""  # the last line that is not empty
        os.set_blocking(source, False)

    def pump(self) -> bool:
        """Copy the output that has arrived; return whether more may come."""
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return True
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the training
                self._log.write(data)
        # Split after each newline and each carriage return; progress bars end lines with the
        # latter.
        parts = (self._pending + data).replace(b"\r\n", b"\n").splitlines(keepends=True)
        complete = bool(parts) and parts[-1].endswith((b"\n", b"\r"))
        *lines, self._pending = [*parts, b""] if complete or not parts else parts
        if len(self._pending) > _MAX_LINE_BYTES or not data:
            lines, self._pending = [*lines, self._pending], b""
        self._last = next((line for line in reversed(lines) if line.strip()), self._last)
        self._show(b"".join(self._prefix + line for line in lines if line), ends=not data)
        return bool(data)

    @property
    def last_line(self) -> str:
        """Return the last line, in printable characters without colours."""
        text = _COLOUR.sub("", self._last.decode(errors="replace")).strip()
        return shortened(printable(text), _LAST_CHARACTERS)

    def close(self) -> None:
        """Copy the remaining output, and close the stream."""
        while select.select([self.source], [], [], 0)[0] and self.pump():
            pass
        self._show(self._prefix + self._pending if self._pending else b"", ends=True)
        os.close(self.source)

    def _show(self, text: bytes, ends: bool) -> None:
        if ends and text and not text.endswith((b"\n", b"\r")):
            text += b"\n"
        with contextlib.suppress(OSError):  # no program reads the output any more
            while text:
                text = text[os.write(self.terminal, text) :]
