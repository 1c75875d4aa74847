"""What a peer can get wrong in HTTP/2, as closed sets of reasons, and the error code that answers each (RFC 9113).

The reasons are slugs for logs and counters; they never contain a peer's bytes.
"""

from __future__ import annotations

from typing import Final

# RFC 9113 section 7
NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
SETTINGS_TIMEOUT: Final = 0x4
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
CONNECT_ERROR: Final = 0xA
ENHANCE_YOUR_CALM: Final = 0xB
INADEQUATE_SECURITY: Final = 0xC
HTTP_1_1_REQUIRED: Final = 0xD

CONNECTION_REASONS: Final[dict[str, int]] = {
    # section 3.4
    "preface": PROTOCOL_ERROR,
    # section 4.2
    "frame-too-large": FRAME_SIZE_ERROR,
    "frame-size": FRAME_SIZE_ERROR,
    # section 4.3
    "hpack": COMPRESSION_ERROR,
    "no-continuation": PROTOCOL_ERROR,
    "continuation": PROTOCOL_ERROR,
    # section 5.1
    "idle-stream": PROTOCOL_ERROR,
    "stream-id": PROTOCOL_ERROR,
    "closed-stream": STREAM_CLOSED,
    # section 6
    "padding": PROTOCOL_ERROR,
    "no-stream": PROTOCOL_ERROR,
    "not-on-stream-0": PROTOCOL_ERROR,
    "push-promise": PROTOCOL_ERROR,
    "settings-value": PROTOCOL_ERROR,
    "settings-window": FLOW_CONTROL_ERROR,
    "window-increment": PROTOCOL_ERROR,
    "window-overflow": FLOW_CONTROL_ERROR,
    "window-exceeded": FLOW_CONTROL_ERROR,
    "goaway-id": PROTOCOL_ERROR,
    # RFC 9218 section 7.1
    "priority-update": PROTOCOL_ERROR,
    # RFC 9113 section 10.5: a peer that is allowed each of it, but not so much of it
    "header-list-size": ENHANCE_YOUR_CALM,
    "header-block-size": ENHANCE_YOUR_CALM,
    "continuation-flood": ENHANCE_YOUR_CALM,
    "settings-flood": ENHANCE_YOUR_CALM,
    "ping-flood": ENHANCE_YOUR_CALM,
    "reset-flood": ENHANCE_YOUR_CALM,
    "empty-frame-flood": ENHANCE_YOUR_CALM,
    "small-frame-flood": ENHANCE_YOUR_CALM,
    "priority-flood": ENHANCE_YOUR_CALM,
    "window-update-flood": ENHANCE_YOUR_CALM,
    "unknown-frame-flood": ENHANCE_YOUR_CALM,
    "late-frame-flood": ENHANCE_YOUR_CALM,
    "unread-answers": ENHANCE_YOUR_CALM,
}
"""Every reason for which the codec ends a connection, with the code of its GOAWAY."""

STREAM_REASONS: Final[dict[str, int]] = {
    # section 5.1
    "half-closed": STREAM_CLOSED,
    "too-many-streams": REFUSED_STREAM,
    # section 6
    "stream-window-increment": PROTOCOL_ERROR,
    "stream-window-overflow": FLOW_CONTROL_ERROR,
    "stream-window-exceeded": FLOW_CONTROL_ERROR,
    "frame-size": FRAME_SIZE_ERROR,
    "depends-on-itself": PROTOCOL_ERROR,
    # section 8.1: trailers
    "trailers-without-end": PROTOCOL_ERROR,
    "pseudo-in-trailers": PROTOCOL_ERROR,
    "forbidden-trailer": PROTOCOL_ERROR,
    "trailers-too-large": ENHANCE_YOUR_CALM,
    # section 8.1.1
    "content-length": PROTOCOL_ERROR,
    "two-content-lengths": PROTOCOL_ERROR,
    "length-mismatch": PROTOCOL_ERROR,
    # section 8.2
    "field-name": PROTOCOL_ERROR,
    "upper-case-name": PROTOCOL_ERROR,
    "field-value": PROTOCOL_ERROR,
    "connection-field": PROTOCOL_ERROR,
    "te": PROTOCOL_ERROR,
    # section 8.3
    "pseudo-after-field": PROTOCOL_ERROR,
    "pseudo-unknown": PROTOCOL_ERROR,
    "pseudo-repeated": PROTOCOL_ERROR,
    "pseudo-missing": PROTOCOL_ERROR,
    "method": PROTOCOL_ERROR,
    "scheme": PROTOCOL_ERROR,
    "path": PROTOCOL_ERROR,
    "authority": PROTOCOL_ERROR,
    "userinfo": PROTOCOL_ERROR,
    "no-host": PROTOCOL_ERROR,
    "two-hosts": PROTOCOL_ERROR,
    "authority-mismatch": PROTOCOL_ERROR,
    # section 8.5 and RFC 8441
    "connect": PROTOCOL_ERROR,
    "protocol": PROTOCOL_ERROR,
    # a response (section 8.3.2, RFC 9110 section 15)
    "status": PROTOCOL_ERROR,
    "data-before-head": PROTOCOL_ERROR,
    "interim-with-end": PROTOCOL_ERROR,
    "switching-protocols": PROTOCOL_ERROR,
    "head-too-large": ENHANCE_YOUR_CALM,
    # the peer's or the user's own word
    "reset-by-peer": CANCEL,
    "not-processed": REFUSED_STREAM,
}
"""Every reason for which a stream ends early, with the code of the RST_STREAM that tells it, where one is sent."""

REFUSED_STATUSES: Final[dict[str, int]] = {
    "target-too-long": 414,
    "expectation": 417,
    "head-too-large": 431,
    "too-many-fields": 431,
}
"""Requests that are well-formed but not taken: the reason, and the status to answer with."""


class ConnectionFault(Exception):  # noqa: N818 (says what it is)
    """Inside the codec: the connection must end; ``reason`` is out of `CONNECTION_REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StreamFault(Exception):  # noqa: N818 (says what it is)
    """Inside the codec: a stream must end; ``reason`` is out of `STREAM_REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
