"""The demo's WebSocket echo: one connection after its request head was read (RFC 6455)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

READ_BYTES = 65_536


def _answer(connection: WSConnection, event: Event) -> bytes:
    """What goes back for one event. A message's fragments go back one by one, so that none is held whole."""
    match event:
        case Request():
            return connection.send(AcceptConnection())
        case TextMessage(data=data, message_finished=finished):
            return connection.send(TextMessage(data=data, message_finished=finished))
        case BytesMessage(data=data, message_finished=finished):
            return connection.send(BytesMessage(data=data, message_finished=finished))
        case Ping():
            return connection.send(event.response())
        case CloseConnection() if connection.state is not ConnectionState.CLOSED:
            return connection.send(event.response())
    return b""


async def echo(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    target: bytes,
    fields: Iterable[tuple[bytes, bytes]],
    early: bytes,
) -> None:
    """Answers the opening handshake, then echoes until either side closes; ``early`` came right behind the head.

    A handshake or a frame that is not valid ends the connection (400 or a close frame). Raises OSError.
    """
    connection = WSConnection(ConnectionType.SERVER)
    try:
        connection.initiate_upgrade_connection(list(fields), target.decode("latin-1"))
    except RemoteProtocolError:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        return
    data = early
    while True:
        try:
            if data:
                connection.receive_data(data)
            for event in connection.events():
                writer.write(_answer(connection, event))
            await writer.drain()
        except (RemoteProtocolError, LocalProtocolError):
            if connection.state is ConnectionState.OPEN:
                writer.write(connection.send(CloseConnection(code=1002)))
                await writer.drain()
            elif connection.state is ConnectionState.CONNECTING:
                writer.write(connection.send(RejectConnection(status_code=400)))
                await writer.drain()
            return
        if connection.state is ConnectionState.CLOSED:
            return
        data = await reader.read(READ_BYTES)
        if not data:
            return
