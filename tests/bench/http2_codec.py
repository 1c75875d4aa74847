"""CPU of the HTTP/2 codec alone: a GET with nine fields in, a response with five and 90 bytes out.

Run by hand: ``python -m tests.bench.http2_codec``. Prints microseconds a request, for one and for several requests a
wake-up, with heads that repeat and with a path that is new each time.
"""

from __future__ import annotations

from time import process_time

from hpack import Encoder

from proxy.protocol.http2 import Limits, Request, RequestHeads, ServerConnection, encode_response
from tests.harness import http2 as h

REQUESTS = 20_000
FIELDS = (
    *((":method", "GET"), (":scheme", "https"), (":authority", "example.org"), (":path", "/some/where?with=query")),
    *(("user-agent", "Mozilla/5.0 (X11; Linux x86_64)"), ("accept", "*/*"), ("accept-language", "en")),
    *(("accept-encoding", "gzip, deflate, br"), ("cookie", "session=0123456789abcdef")),
)
BODY = b"x" * 90


def microseconds(batch: int, *, repeats: bool) -> float:
    """User time a request where ``batch`` come together."""
    encoder = Encoder()
    wire: list[bytes] = []
    for number in range(REQUESTS):
        # A path of its own is a literal that is not indexed, as browsers send it.
        fields = [f if repeats or f[0] != ":path" else (":path", f"/{number}", True) for f in FIELDS]
        wire.append(h.frame(h.HEADERS, 5, 2 * number + 1, encoder.encode(fields)))
    connection = ServerConnection(Limits(), RequestHeads())
    connection.feed(h.PREFACE + h.settings((0x4, 2**20)) + h.settings(flags=h.ACK) + h.window_update(0, 2**30), 0.0)
    connection.take_output()
    batches = [b"".join(wire[at : at + batch]) for at in range(0, REQUESTS, batch)]
    fields_out = [
        *((b"content-type", b"text/plain"), (b"content-length", b"90"), (b"server", b"example")),
        *((b"date", b"Mon, 30 Nov 2026 00:00:00 GMT"), (b"etag", b'"0123456789"')),
    ]
    block = encode_response(200, fields_out)
    begin = process_time()
    for data in batches:
        for event in connection.feed(data, 0.0):
            assert isinstance(event, Request)
            connection.send_whole(event.stream_id, block, BODY)
        connection.take_output()
    return (process_time() - begin) / REQUESTS * 1e6


def main() -> None:
    """Print the table."""
    for repeats in (True, False):
        for batch in (1, 8, 32):
            kind = "a head seen before" if repeats else "a new path"
            print(f"{kind}, {batch} a wake-up: {microseconds(batch, repeats=repeats):.1f} us a request")


if __name__ == "__main__":
    main()
