"""The end of a message, and the chunked transfer coding both ways (RFC 9112 section 7.1)."""

from __future__ import annotations

import re
from typing import Final

from proxy.protocol.http1.errors import ProtocolError
from proxy.protocol.http1.grammar import FIELD_SECTION, Fault, SectionScan, field_lines_fault, split_fields
from proxy.protocol.http1.heads import Limits

Trailers = tuple[tuple[bytes, bytes], ...]

MAX_CHUNK_BYTES: Final = 2**63 - 1  # what a signed 64-bit integer of another parser holds
MAX_EXTENSION_BYTES: Final = 256  # of one chunk; nobody uses more, and they are dropped anyway
MAX_EXTENSIONS_BYTES: Final = 16384  # of one message
_MAX_SIZE_LINE_BYTES: Final = 16 + MAX_EXTENSION_BYTES + len("\r\n")

LAST_CHUNK: Final = b"0\r\n\r\n"

# RFC 9110 section 6.5.1: fields that frame, route, modify, authenticate or describe the content, and those by which
# proxies tell who the client is: in a trailer they would come after the decision that they are about.
FORBIDDEN_TRAILERS: Final = frozenset(
    {
        *(b"transfer-encoding", b"content-length", b"trailer", b"te", b"connection", b"keep-alive"),
        *(b"proxy-connection", b"upgrade", b"http2-settings", b"host", b"expect", b"max-forwards"),
        *(b"cache-control", b"pragma", b"range", b"if-match", b"if-none-match", b"if-modified-since"),
        *(b"if-unmodified-since", b"if-range", b"authorization", b"proxy-authorization", b"www-authenticate"),
        *(b"proxy-authenticate", b"cookie", b"set-cookie", b"content-encoding", b"content-type", b"content-range"),
        *(b"forwarded", b"via", b"x-real-ip", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"),
        *(b"x-forwarded-port", b"x-request-id", b"proxy", b"location", b"vary", b"age", b"expires", b"date"),
    }
)

# RFC 9112 section 7.1: no sign, prefix or whitespace belongs to a size.
_PLAIN_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16}+)\r\n")
_HEX_DIGITS: Final = re.compile(rb"[0-9A-Fa-f]{1,16}+")
# RFC 9112 section 7.1.1, without the whitespace that its grammar calls bad: parsers disagree about where it may be.
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_QUOTED: Final = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
_EXTENSIONS: Final = re.compile(rb"(?:;%b(?:=(?:%b|%b))?)*" % (_TOKEN, _TOKEN, _QUOTED))


class EndOfMessage:
    """A message with a body is complete. ``trailers``: (name as on the wire, value), in order."""

    __slots__ = ("trailers",)

    def __init__(self, trailers: Trailers = ()) -> None:
        self.trailers = trailers

    def __repr__(self) -> str:
        return f"EndOfMessage({self.trailers!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EndOfMessage) and self.trailers == other.trailers

    def __hash__(self) -> int:
        return hash(self.trailers)


END: Final = EndOfMessage()

BodyEvent = bytes | EndOfMessage | None


def encode_chunk(data: bytes) -> bytes:
    """One chunk. Empty for empty data, which as a chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def encode_last_chunk(trailers: Trailers) -> bytes:
    """The end of a chunked body with its trailers, which must have come out of a decoder."""
    if not trailers:
        return LAST_CHUNK
    return b"0\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % trailer for trailer in trailers])


def _piece(data: bytes | bytearray, start: int, end: int) -> bytes:
    if type(data) is bytes:
        return data[start:end]  # the same object where it is all of it
    return bytes(memoryview(data)[start:end])


class ChunkedBody:
    """Decodes one chunked body with its trailers (RFC 9112 section 7.1)."""

    __slots__ = (
        "_extensions_bytes",
        "_fault",
        "_in_chunk",
        "_left",
        "_max_fields",
        "_max_trailer_bytes",
        "_searched",
        "_trailer_scan",
    )

    def __init__(self, fault: Fault, limits: Limits) -> None:
        self._fault = fault
        self._max_fields = limits.max_fields
        self._max_trailer_bytes = limits.max_trailer_bytes
        self._in_chunk = False
        self._left = 0
        self._searched = 0
        self._extensions_bytes = 0
        self._trailer_scan: SectionScan | None = None

    def decode(self, data: bytes | bytearray, pos: int) -> tuple[BodyEvent, int]:
        """Takes what is held and where to begin in it; returns an event (None: needs more) and where to go on.

        Bytes are all that is decodable, joined. What comes before a fault is returned first and the fault is raised by
        the next call, so the events do not depend on how the input was cut. Raises `ProtocolError`.
        """
        if self._trailer_scan is not None:
            return self._trailers(self._trailer_scan, data, pos)
        parts: list[bytes] = []
        try:
            while True:
                if self._in_chunk:
                    end = min(len(data), pos + self._left)
                    if end > pos:
                        parts.append(_piece(data, pos, end))
                        self._left -= end - pos
                        pos = end
                    if self._left:
                        break
                    if data[pos : pos + 2] != b"\r\n":
                        if not b"\r\n".startswith(data[pos : pos + 2]):
                            raise self._fault("chunk-end")
                        break
                    pos += 2
                    self._in_chunk = False
                size_end = self._size(data, pos)
                if size_end < 0:
                    break
                pos = size_end
                if not self._left:
                    scan = SectionScan(
                        self._fault,
                        max_bytes=self._max_trailer_bytes,
                        max_lines=self._max_fields,
                        reason="trailers-too-large",
                    )
                    self._trailer_scan = scan
                    return (b"".join(parts), pos) if parts else self._trailers(scan, data, pos)
                self._in_chunk = True
        except ProtocolError:
            if not parts:
                raise
        if not parts:
            return None, pos
        return parts[0] if len(parts) == 1 else b"".join(parts), pos

    def _size(self, data: bytes | bytearray, pos: int) -> int:
        """Reads a chunk's size into ``_left``; returns where its line ends, or -1."""
        plain = _PLAIN_SIZE.match(data, pos)
        if plain is not None:
            end = plain.end()
            digits = plain[1]
        else:
            lf = data.find(b"\n", pos + self._searched, pos + _MAX_SIZE_LINE_BYTES)
            if lf < 0:
                self._searched = len(data) - pos
                if self._searched >= _MAX_SIZE_LINE_BYTES:
                    raise self._fault("chunk-line-too-long")
                return -1
            end = lf + 1
            digits = self._extended_size(bytes(data[pos:end]))
        size = int(digits, 16)
        if size > MAX_CHUNK_BYTES:
            raise self._fault("chunk-too-large")
        self._searched = 0
        self._left = size
        return end

    def _extended_size(self, line: bytes) -> bytes:
        """The digits of a size line that has extensions, which are dropped (RFC 9112 section 7.1.1)."""
        size = _HEX_DIGITS.match(line)
        if size is None or line[size.end()] != ord(";"):
            raise self._fault("chunk-size")
        if line[-2:] != b"\r\n":
            raise self._fault("bare-lf")
        extensions_bytes = len(line) - 2 - size.end()
        if extensions_bytes > MAX_EXTENSION_BYTES:
            raise self._fault("chunk-line-too-long")
        if not _EXTENSIONS.fullmatch(line, size.end(), len(line) - 2):
            raise self._fault("chunk-extension")
        self._extensions_bytes += extensions_bytes
        if self._extensions_bytes > MAX_EXTENSIONS_BYTES:
            raise self._fault("chunk-extensions-too-large")
        return size[0]

    def _trailers(self, scan: SectionScan, data: bytes | bytearray, pos: int) -> tuple[BodyEvent, int]:
        if data[pos : pos + 2] == b"\r\n":
            return END, pos + 2
        end = scan.end(data, pos)
        if end < 0:
            return None, pos
        section = bytes(data[pos:end])
        if not FIELD_SECTION.fullmatch(section):
            raise self._fault(field_lines_fault(section, 0))
        fields = split_fields(section, 0)
        if not FORBIDDEN_TRAILERS.isdisjoint([lower for lower, _, _ in fields]):
            raise self._fault("forbidden-trailer")
        return EndOfMessage(tuple([(name, value) for _, name, value in fields])), end
