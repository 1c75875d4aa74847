"""The grammar of HTTP/1.1 as byte expressions, and the scan for the end of a section of lines.

Two properties hold for every expression here and are to be kept. What follows a repeat never begins with what the
repeat takes, so a failing match has no second way to try and its time is linear; single classes are possessive, which
spares even the unwinding, but groups are not, since Python before 3.11.5 gets possessive groups wrong
(python/cpython#106052). And none of them accepts CR or LF inside an element.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from proxy.protocol.http1.errors import ProtocolError

Fields = tuple[tuple[bytes, bytes, bytes], ...]
"""Field lines in order, each as (lower-case name, name as on the wire, value without whitespace around it)."""

Fault = Callable[[str], ProtocolError]
"""Makes the error for a reason: the status depends on whose message it is."""

MAX_METHOD_BYTES: Final = 32

# RFC 9110 section 5.6.2
_TCHAR: Final = rb"!#$%&'*+\-.^_`|~0-9A-Za-z"
# RFC 9110 section 5.5: VCHAR, obs-text, SP and HTAB; every other control byte is refused.
_VALUE: Final = rb"\t\x20-\x7e\x80-\xff"
# RFC 9112 section 5.1: no whitespace before the colon; section 5.2: no line starts with whitespace.
_FIELD_LINES: Final = rb"(?:[%b]++:[%b]*+\r\n)*\r\n" % (_TCHAR, _VALUE)
# RFC 9112 section 3.2: visible ASCII; a fragment is never sent (RFC 3986 section 3.5, RFC 9110 section 7.1).
_TARGET: Final = rb"\x21\x22\x24-\x7e"

TOKEN: Final = re.compile(rb"[%b]++" % _TCHAR)
TARGET: Final = re.compile(rb"[%b]++" % _TARGET)
PROTOCOL: Final = re.compile(rb"[%b]++(?:/[%b]++)?" % (_TCHAR, _TCHAR))  # RFC 9110 section 7.8
CONTENT_LENGTH: Final = re.compile(rb"[0-9]{1,18}+")  # RFC 9110 section 8.6; 18 digits always fit 64 bits
# RFC 9112 section 7: a coding's name, without parameters, since no coding that takes some is known here.
CODINGS: Final = re.compile(rb"[%b]++(?:[ \t]*+,[ \t]*+[%b]++)*" % (_TCHAR, _TCHAR))

# RFC 9112 sections 2.1 and 3
REQUEST_HEAD: Final = re.compile(
    rb"([%b]{1,%d}+) ([%b]++) HTTP/1\.([01])\r\n%b" % (_TCHAR, MAX_METHOD_BYTES, _TARGET, _FIELD_LINES)
)
# RFC 9112 section 4; the reason phrase may be empty, and the space before it is often missing then.
RESPONSE_HEAD: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([%b]*+))?\r\n%b" % (_VALUE, _FIELD_LINES))
FIELD_SECTION: Final = re.compile(_FIELD_LINES)

_METHOD_PART: Final = re.compile(rb"[%b]++(?= )" % _TCHAR)
_TARGET_PART: Final = re.compile(rb"[%b]++(?= )" % _TARGET)
_VERSION_PART: Final = re.compile(rb"HTTP/[0-9]\.[0-9]")
_NAME_PART: Final = re.compile(rb"[%b]*+" % _TCHAR)
_VALUE_PART: Final = re.compile(rb"[%b]*+" % _VALUE)
_LINE_END: Final = re.compile(rb"\r\n|[\r\n]")

_CRLF: Final = b"\r\n"
_REQUEST_LINE_OVERHEAD_BYTES: Final = MAX_METHOD_BYTES + len("  HTTP/1.1\r\n")


def split_fields(section: bytes, start: int) -> Fields:
    """The field lines of ``section`` from ``start`` on, which must have been matched by an expression above."""
    if start + len(_CRLF) == len(section):
        return ()
    # The grammar has no other whitespace than SP and HTAB, so a plain strip() is right. Taking lines apart this way
    # costs less than an expression with two groups.
    return tuple(
        [
            (name.lower(), name, value.strip())
            for name, _, value in [line.partition(b":") for line in section[start:-4].split(_CRLF)]
        ]
    )


def request_line_fault(line: bytes, max_target_bytes: int) -> str:
    """The reason for which a request line (without its CRLF) is refused, or an empty string.

    The status of a request target that is too long needs the line to be right up to there.
    """
    method = _METHOD_PART.match(line)
    if method is None or method.end() > MAX_METHOD_BYTES:
        return "method"
    target = _TARGET_PART.match(line, method.end() + 1)
    if target is None:
        return "request-line" if line.count(b" ") < 2 else "target"
    if target.end() - target.start() > max_target_bytes:
        return "target-too-long"
    version = _VERSION_PART.fullmatch(line, target.end() + 1)
    if version is None:
        return "request-line"
    return "" if version[0] in (b"HTTP/1.0", b"HTTP/1.1") else "version"


def status_line_fault(line: bytes) -> str:
    """The reason for which a status line (without its CRLF) is refused, or an empty string."""
    if RESPONSE_HEAD.fullmatch(line + b"\r\n\r\n"):
        return ""
    version = _VERSION_PART.match(line)
    return "version" if version and version[0] not in (b"HTTP/1.0", b"HTTP/1.1") else "status-line"


def field_lines_fault(section: bytes, start: int) -> str:
    """The reason for which the field lines of ``section`` from ``start`` on are refused, or an empty string.

    ``section`` has passed a `SectionScan`: every CR and LF is part of a CRLF, and an empty line ends it.
    """
    for line in section[start:-2].split(_CRLF)[:-1]:
        name = _NAME_PART.match(line)
        name_end = name.end() if name else 0
        if line[0] in b" \t":
            return "obs-fold"
        if line[name_end : name_end + 1] != b":":
            if line[name_end:].lstrip(b" \t")[:1] == b":":
                return "space-before-colon"
            return "field-name" if b":" in line else "field-line"
        if not name_end:
            return "field-name"
        if not _VALUE_PART.fullmatch(line, name_end + 1):
            return "field-value"
    return ""


class SectionScan:
    """Looks for the empty line that ends a head or a trailer section, in input that comes in any pieces.

    Each byte is looked at once however the input is cut, and the verdict is a function of the bytes alone: the fault
    whose last byte comes first is the one raised.

    ``max_bytes``: of the whole section with its empty line. ``first_line_max_bytes``: of the first line with its CRLF.
    ``max_lines``: without the empty line.
    """

    __slots__ = (
        "_fault",
        "_first_line_max_bytes",
        "_first_line_reason",
        "_line_start",
        "_lines",
        "_max_bytes",
        "_max_lines",
        "_reason",
        "scanned",
    )

    def __init__(
        self,
        fault: Fault,
        *,
        max_bytes: int,
        max_lines: int,
        reason: str,
        first_line_max_bytes: int | None = None,
        first_line_reason: str | None = None,
    ) -> None:
        self._fault = fault
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._reason = reason
        self._first_line_max_bytes = max_bytes if first_line_max_bytes is None else first_line_max_bytes
        self._first_line_reason = reason if first_line_reason is None else first_line_reason
        self.scanned = 0
        """How many bytes of the section need not be looked at again."""
        self._lines = 0
        self._line_start = 0

    def end(self, data: bytes | bytearray, start: int) -> int:
        """The index in ``data`` after the empty line, or -1 when more input is needed.

        ``start``: where the section begins in ``data``, in which nothing before the end may have changed since the
        call before. Raises `ProtocolError`.
        """
        size = len(data) - start
        for match in _LINE_END.finditer(data, start + self.scanned):
            at = match.start() - start
            after = match.end() - start
            if after - at == 1 and data[start + at] == 13:
                if after == size:  # its LF may still come
                    self.scanned = at
                    self._check_size(size)
                    return -1
                self._check_size(at + 2)
                raise self._fault("bare-cr")
            self._check_size(after)
            if after - at == 1:
                raise self._fault("bare-lf")
            if at == self._line_start:
                return start + after
            self._lines += 1
            self._line_start = after
            if self._lines > self._max_lines:
                raise self._fault("too-many-fields")
        self.scanned = size
        self._check_size(size)
        return -1

    def _check_size(self, size: int) -> None:
        if not self._lines:
            if size > self._first_line_max_bytes:
                raise self._fault(self._first_line_reason)
        elif size > self._max_bytes:
            raise self._fault(self._reason)


def request_scan(fault: Fault, max_head_bytes: int, max_fields: int, max_target_bytes: int) -> SectionScan:
    """The scan for the end of a request's head: a first line that does not end is a target that is too long."""
    return SectionScan(
        fault,
        max_bytes=max_head_bytes,
        max_lines=max_fields + 1,
        reason="head-too-large",
        first_line_max_bytes=min(max_head_bytes, max_target_bytes + _REQUEST_LINE_OVERHEAD_BYTES),
        first_line_reason="target-too-long",
    )
