"""One stream of a connection: its state (RFC 9113 section 5.1), its two windows, and what waits to be sent on it."""

from __future__ import annotations

from proxy.protocol.http2.priority import UNSIGNALLED, Priority


class Stream:
    """A stream that is open or half-closed. Idle and closed ones have no object; see ``Connection``."""

    __slots__ = (
        "answered",
        "blocks",
        "content_left",
        "ending",
        "head_done",
        "held_back",
        "id",
        "local_ended",
        "priority",
        "queue",
        "queued",
        "ready",
        "receive_held",
        "receive_target",
        "receive_window",
        "refused",
        "remote_ended",
        "send_window",
        "to_head",
        "trailers",
        "tunnel",
        "turn",
    )

    def __init__(self, stream_id: int, send_window: int, receive_window: int, receive_target: int) -> None:
        self.id = stream_id
        self.remote_ended = False
        """The peer has sent END_STREAM."""
        self.local_ended = False
        """Our END_STREAM has been taken."""
        self.head_done = False
        """Client role: the final head has come."""
        self.answered = False
        """Server role: the final head has been sent."""
        self.refused = False
        """Server role: what else comes of the request is dropped."""
        self.tunnel = False
        """Opened by CONNECT: its two directions end apart."""
        self.to_head = False
        """Client role: it answers HEAD."""
        self.content_left: int | None = None
        """How much body Content-Length still announces; None without one (section 8.1.1)."""

        self.receive_window = receive_window
        """What the peer may send."""
        self.receive_held = 0
        """What it has sent and nobody has consumed."""
        self.receive_target = receive_target
        """What both together should be."""

        self.send_window = send_window
        self.blocks: list[tuple[bytes, bool]] = []
        """Heads to be sent, each with whether it ends the stream."""
        self.queue: list[bytes | memoryview] = []
        self.queued = 0
        """Bytes in ``queue``."""
        self.ending = False
        """Nothing more will be queued: END_STREAM goes with the last of it."""
        self.trailers: bytes | None = None
        self.ready = False
        """It is in the outbox's list."""
        self.held_back = False
        """Its producer was told to stop."""
        self.priority: Priority = UNSIGNALLED
        self.turn = 0
        """When it was last served."""

    @property
    def sendable(self) -> bool:
        """Whether something could be sent if the connection's window allows."""
        if self.blocks:
            return True
        return self.send_window > 0 if self.queued else self.ending
