"""What a peer may do at most: one table. Past a bound the connection ends with ENHANCE_YOUR_CALM (RFC 9113 10.5)."""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """A token bucket: ``burst`` at once, then ``per_sec``."""

    burst: float
    per_sec: float


class Limits(NamedTuple):
    """The bounds of one connection. Sizes in bytes."""

    max_concurrent_streams: int = 128
    """Streams that the peer may have open (RFC 9113 section 5.1.2); more are refused, and each counts as a reset."""
    max_header_list_bytes: int = 32_768
    """Of a decoded head as RFC 9113 section 6.5.2 counts it, 32 bytes a field included (431)."""
    max_fields: int = 100
    """Fields of a head (431), and again of trailers."""
    max_target_bytes: int = 16_384
    """``:path`` (414)."""
    max_trailer_bytes: int = 8_192
    hard_factor: int = 4
    """So many times ``max_header_list_bytes``, in a head decoded or encoded, is no mistake any more but an attack."""
    max_continuations: int = 32
    """CONTINUATION frames of one head."""
    max_frame_bytes: int = 16_384
    """SETTINGS_MAX_FRAME_SIZE, ours."""

    initial_window_bytes: int = 32_768
    """What a peer may send on each stream before any of it is consumed: the floor of each stream."""
    max_window_bytes: int = 262_144
    """To what a stream's window grows while its body is consumed as it comes ..."""
    window_pool_bytes: int = 1_048_576
    """... out of this pool of the connection. So a connection holds at most
    ``max_concurrent_streams * initial_window_bytes + window_pool_bytes`` of bodies that nobody has consumed."""
    connection_window_bytes: int = 1_048_576
    """Given back on receipt: a stream that is not consumed never stalls the others."""

    max_control_bytes: int = 16_384
    """Answers (acknowledgements, resets, window updates) that wait because the peer does not read."""

    settings: Rate = Rate(32, 1)
    pings: Rate = Rate(200, 50)
    resets: Rate = Rate(200, 20)
    """RST_STREAM of the peer, and streams that its faults made us reset or refuse ("rapid reset", "made you reset").
    Free: the first one on a stream that we have answered whole, or reset."""
    empty_frames: Rate = Rate(100, 10)
    """DATA, HEADERS and CONTINUATION frames that carry nothing and end nothing."""
    small_frames: Rate = Rate(4_096, 1_000)
    """DATA frames of less than 32 bytes that end nothing; no more than a thousand tiny messages a second, for long."""
    priorities: Rate = Rate(512, 100)
    """PRIORITY and PRIORITY_UPDATE."""
    window_updates: Rate = Rate(512, 100)
    """WINDOW_UPDATE, beyond four for each DATA frame that was sent to the peer and for each end of a stream. A small
    frame does not count while the body waits for more room."""
    unknown_frames: Rate = Rate(100, 10)
    late_frames: Rate = Rate(128, 20)
    """DATA and HEADERS on streams that we have reset, beyond what can have been under way: see ``Connection``."""


DEFAULT_LIMITS = Limits()
