"""One line an exchange: built on the hot path, written by a thread, bounded all the way.

``combined`` is the Combined Log Format with five fields more at the end. Client text can forge neither a line nor a
field nor a terminal escape: bytes outside printable ASCII, the quote and the backslash (outside quotes the space too)
become ``\\xHH``, from which the value can be had back. ``json`` takes bytes as ISO 8859-1 characters, which loses
nothing either. Authorization and Cookie never come here.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Protocol

from proxy.observe import counters
from proxy.observe.reporter import Reporter
from proxy.observe.timestamps import common_log_time, rfc3339_second
from proxy.observe.writer import LineWriter

FLUSH_INTERVAL_SECS = 1.0
BATCH_BYTES = 65_536

_QUOTED_DIRTY = re.compile(rb"[^ !#-\[\]-~]")
_BARE_DIRTY = re.compile(rb"[^!#-\[\]-~]")
_ESCAPES = {
    dirty: tuple(b"\\x%02X" % value if dirty.match(bytes((value,))) else bytes((value,)) for value in range(256))
    for dirty in (_QUOTED_DIRTY, _BARE_DIRTY)
}
"""What each byte becomes."""
_EMPTY = b"-"

_MEMO_ENTRIES = 2048
_MEMO_BYTES = 512
"""Longer values are not remembered, so that a memo holds at most about 1 MB."""

_MILLISECONDS = tuple(b"%d.%03d" % divmod(ms, 1000) for ms in range(2000))
"""A table costs a quarter of formatting a float."""
_TABLE_MS = len(_MILLISECONDS)
_STATUS = {status: b'" %d ' % status for status in range(1000)}


class AccessLogSettings(Protocol):
    """What of the configuration's ``[access_log]`` is read here."""

    @property
    def path(self) -> str: ...
    @property
    def format(self) -> str: ...


class _EscapeMemo(dict[bytes, bytes]):
    """Value outside quotes to escaped value, worked out where it is missing; bounded, emptied when full."""

    def __missing__(self, value: bytes) -> bytes:
        escaped = _escaped(value, _BARE_DIRTY)
        if len(value) <= _MEMO_BYTES:
            if len(self) >= _MEMO_ENTRIES:
                self.clear()
            self[value] = escaped
        return escaped


class LoggedRequest:
    """What of a request goes into its line, escaped once: a head that is seen again keeps it.

    The arguments are the client's bytes; empty ones are logged as ``-`` (JSON: as empty strings).
    """

    __slots__ = ("after", "before", "host", "referer", "request_line", "user_agent")

    def __init__(self, request_line: bytes, referer: bytes, user_agent: bytes, host: bytes) -> None:
        self.request_line = request_line
        self.referer = referer
        self.user_agent = user_agent
        self.host = host
        self.before = _escaped(request_line, _QUOTED_DIRTY)
        """``combined``: what stands between the time and the status."""
        self.after = b'"%b" "%b" %b' % (
            _escaped(referer, _QUOTED_DIRTY),
            _escaped(user_agent, _QUOTED_DIRTY),
            _escaped(host, _BARE_DIRTY),
        )
        """``combined``: what stands between the size and the duration."""


def _escaped(value: bytes, dirty: re.Pattern[bytes]) -> bytes:
    if dirty.search(value) is None:
        return value or _EMPTY
    # By a table: to call a function for each match would cost the worker 30 ms for a head full of them.
    return b"".join(map(_ESCAPES[dirty].__getitem__, value))


def _seconds(duration: float) -> bytes:
    """Seconds with three decimals. Beyond the table, and where a clock was set back, by formatting."""
    ms = int(duration * 1000)
    return _MILLISECONDS[ms] if 0 <= ms < _TABLE_MS else b"%.3f" % duration


def _json_text(value: bytes) -> str:
    """The JSON string, quotes included, in printable ASCII."""
    return encode_basestring_ascii(value.decode("latin-1"))


class AccessLog:
    """The access log of one worker."""

    def __init__(
        self,
        settings: AccessLogSettings,
        cells: memoryview,
        reporter: Reporter,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the log. ``clock`` gives seconds since the epoch.

        Raises ConfigError and StartError for a path that cannot be opened, see ``LineWriter``.
        """
        self._cells = cells
        self._reporter = reporter
        self._clock = clock
        self._writer = None if settings.path == "off" else LineWriter(settings.path, key="access_log.path")
        self._is_json = settings.format == "json"
        self._second = -1
        self._prefix = b""
        self._json_second = ""
        self._bare = _EscapeMemo()
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._seen_faults = 0
        self._seen_dropped = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def request(
        self,
        remote: bytes,
        logged: LoggedRequest,
        status: int,
        body_bytes: int,
        duration: float,
        upstream_secs: float,
        request_id: bytes,
        tls: bytes,
        stream_id: int = 0,
    ) -> None:
        """Log one exchange.

        ``status`` is 100 to 599; ``duration`` and ``upstream_secs`` are seconds, the latter below 0 when no upstream
        was asked; ``stream_id`` is HTTP/2's, told by ``json`` alone (0: ``null``). Empty values are logged as ``-``
        (JSON: as empty strings).
        """
        if self._writer is None:
            return
        now = self._clock()
        second = int(now)
        if second != self._second:
            self._begin_second(second)
        if self._is_json:
            line = self._json_line(
                now, remote, logged, status, body_bytes, duration, upstream_secs, request_id, tls, stream_id
            )
        else:
            bare = self._bare
            ms = int(duration * 1000)
            upstream_ms = int(upstream_secs * 1000)
            line = b"%b%b%b%b%d %b %b %b %b %b\n" % (
                bare[remote],
                self._prefix,
                logged.before,
                _STATUS[status],
                body_bytes,
                logged.after,
                _MILLISECONDS[ms] if 0 <= ms < _TABLE_MS else _seconds(duration),
                _EMPTY
                if upstream_secs < 0
                else _MILLISECONDS[upstream_ms]
                if upstream_ms < _TABLE_MS
                else _seconds(upstream_secs),
                request_id if request_id.isalnum() else bare[request_id],
                bare[tls],
            )
        self._lines.append(line)
        self._size_bytes += len(line)
        if self._size_bytes >= BATCH_BYTES:
            self.flush()

    @property
    def descriptors(self) -> int:
        """Descriptors that the log has for itself."""
        return 0 if self._writer is None else self._writer.descriptors

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the writer's thread and the timer that flushes each second. After the fork, once."""
        self._loop = loop
        if self._writer is not None:
            self._writer.start()
            self._timer = loop.call_later(FLUSH_INTERVAL_SECS, self._on_timer)

    def flush(self) -> None:
        """Hand what is buffered to the writer; what it does not take is counted."""
        if self._writer is not None and self._lines:
            lines, self._lines, self._size_bytes = self._lines, [], 0
            self._cells[counters.ACCESS_LINES] += len(lines)
            self._writer.write(b"".join(lines), len(lines))

    def reopen(self) -> None:
        """Open the file again (log rotation); what is buffered still goes to the old one."""
        if self._writer is not None:
            self.flush()
            self._writer.reopen()

    def finish(self) -> None:
        """Hand over what is buffered and let the writer end by itself: ``close``, later, need not wait then."""
        if self._writer is not None:
            self.flush()
            self._writer.finish()

    def close(self, timeout_secs: float) -> bool:
        """Write what is buffered, for at most ``timeout_secs``, and end. Whether all of it was written."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writer is None:
            return True
        self.flush()
        done = self._writer.close(timeout_secs)
        self._watch_writer(self._writer)
        self._cells[counters.ACCESS_LINES_DROPPED] += self._writer.lines_unwritten - self._seen_dropped
        return done

    def _on_timer(self) -> None:
        try:
            if self._writer is not None:
                self.flush()
                self._watch_writer(self._writer)
        finally:
            if self._loop is not None:
                self._timer = self._loop.call_later(FLUSH_INTERVAL_SECS, self._on_timer)

    def _watch_writer(self, writer: LineWriter) -> None:
        """Count and report what the writer lost since the last look: its thread does neither."""
        dropped, faults = writer.lines_dropped, writer.faults
        if dropped == self._seen_dropped and faults == self._seen_faults:
            return
        reason = writer.fault if faults != self._seen_faults else "the target does not take lines fast enough"
        lines = dropped - self._seen_dropped
        self._seen_dropped, self._seen_faults = dropped, faults
        self._cells[counters.ACCESS_LINES_DROPPED] += lines
        message = "access lines are lost" if lines else "the log cannot be opened anew: the old file goes on"
        self._reporter.report("access_log.dropped", message, lines=lines, lines_total=dropped, error=reason)

    def _begin_second(self, second: int) -> None:
        self._second = second
        self._prefix = f' - - [{common_log_time(second)}] "'.encode("ascii")
        self._json_second = rfc3339_second(second)

    def _json_line(
        self,
        now: float,
        remote: bytes,
        logged: LoggedRequest,
        status: int,
        body_bytes: int,
        duration: float,
        upstream_secs: float,
        request_id: bytes,
        tls: bytes,
        stream_id: int,
    ) -> bytes:
        upstream = f"{upstream_secs:.6f}" if upstream_secs >= 0 else "null"
        return (
            f'{{"time":"{self._json_second}.{int(now % 1 * 1000):03}Z","remote":{_json_text(remote)},'
            f'"host":{_json_text(logged.host)},"request":{_json_text(logged.request_line)},"status":{status},"bytes":{body_bytes},'
            f'"referer":{_json_text(logged.referer)},"user_agent":{_json_text(logged.user_agent)},"duration_secs":{duration:.6f},'
            f'"upstream_secs":{upstream},"request_id":{_json_text(request_id)},"tls":{_json_text(tls)},'
            f'"stream":{stream_id or "null"}}}\n'
        ).encode("ascii")
