"""A client that pipelines what the proxy answers itself, in turns with others, gets every answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.harness.stage import Stage, open_stage

MANY = 2000
REFUSED = b"GET /%2f HTTP/1.1\r\nHost: a\r\n\r\n"
PLAIN = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


@pytest.mark.parametrize("listener", ["https", "redirect"])
def test_every_pipelined_request_is_answered_in_full(stage: Stage, listener: str) -> None:
    plain = listener == "redirect"
    client = stage.leave_to_me(stage.appliance.connect_redirect()) if plain else stage.client()
    sender = threading.Thread(target=client.send, args=((PLAIN if plain else REFUSED) * MANY,))
    sender.start()
    for _ in range(MANY):
        head = client.read_head()
        assert head.startswith(b"HTTP/1.1 308 " if plain else b"HTTP/1.1 400 ")
        client.read_body(head)
    sender.join()
    if not plain:
        assert client.request(GET).body == b"ok"
