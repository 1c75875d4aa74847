"""How long a body is: the fields that frame it, judged alike for requests and responses (RFC 9112 section 6)."""

from __future__ import annotations

from proxy.protocol.http1.grammar import CODINGS, CONTENT_LENGTH, Fault


def content_length(values: list[bytes], fault: Fault) -> int:
    """The value of the one Content-Length field (RFC 9110 section 8.6).

    A list or a second field is refused also where all values agree, which the RFC allows. Raises `ProtocolError`.
    """
    if len(values) > 1:
        raise fault("two-content-lengths")
    if not CONTENT_LENGTH.fullmatch(values[0]):
        raise fault("content-length")
    return int(values[0])


def check_chunked(values: list[bytes], version: int, other_framing: bool, fault: Fault) -> None:
    """Passes only a single Transfer-Encoding field that is exactly ``chunked`` (RFC 9112 sections 6.1 and 6.3).

    ``other_framing``: the message has a Content-Length as well. Raises `ProtocolError`.
    """
    if version < 11:
        raise fault("coding-in-1.0")
    if other_framing:
        raise fault("length-and-coding")
    value = values[0].lower()
    if len(values) > 1 or not CODINGS.fullmatch(value):
        raise fault("transfer-encoding")
    if value != b"chunked":
        codings = [coding.strip(b" \t") for coding in value.split(b",")]
        raise fault("transfer-encoding" if b"chunked" in codings[:-1] else "unknown-coding")
