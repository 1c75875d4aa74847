"""What the master tells a worker and is answered, over a SOCK_SEQPACKET socket: the two phases of a reload.

prepare (with a file and the new listening sockets)  ->  prepared | failed
commit                                               ->  committed
abort                                                    (no answer)
"""

from __future__ import annotations

import array
import os
import pickle
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.config.schema import Settings, UpstreamTls
from proxy.tls.contexts import ListenerCertificates

MAX_MESSAGE_BYTES = 8192
MAX_DESCRIPTORS = 250
"""SCM_MAX_FD is 253."""

PREPARE = "prepare"
PREPARED = "prepared"
FAILED = "failed"
COMMIT = "commit"
COMMITTED = "committed"
ABORT = "abort"
RETIRE = "retire"
"""After an upgrade: accept nothing more, and end when the connections that there are have ended."""


@dataclass(frozen=True, slots=True)
class NextListener:
    """A listener of the next generation. ``is_new``: its socket comes along; otherwise the worker has it already."""

    label: str
    is_new: bool
    certificates: ListenerCertificates | None  # None: the redirect listener


@dataclass(frozen=True, slots=True)
class NextGeneration:
    """The configuration that a worker is to prepare. It holds keys, so it travels in memory only (a memfd)."""

    number: int
    settings: Settings
    listeners: tuple[NextListener, ...]
    permits: int
    upstream_permits: int
    redirect_permits: int
    handshake_permits: int
    client_cap: int
    https_port: int
    soft_limit: int | None  # raise RLIMIT_NOFILE to this
    cas: Mapping[UpstreamTls, bytes | None]
    """What https upstreams are verified against, see ``UpstreamTrust``: the worker may not be able to read the file."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: a word, a number (the generation), a text (an error)."""

    word: str
    number: int = 0
    text: str = ""


def send(channel: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message with descriptors. Raises OSError when the other side is gone."""
    line = f"{message.word} {message.number} {message.text}".encode()[:MAX_MESSAGE_BYTES]
    ancillary = []
    if descriptors:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    channel.sendmsg([line], ancillary)


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors, which are the caller's; None at the end. Raises OSError."""
    line, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
    if not line:
        return None
    word, number, text = line.decode("utf-8", "replace").split(" ", 2)
    return Message(word, int(number), text), list(descriptors)


def pack(generation: NextGeneration) -> int:
    """The descriptor of a sealed memory file with ``generation`` in it; the caller closes it."""
    descriptor = os.memfd_create("generation", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        pickle.dump(generation, file)
    return descriptor


def unpack(descriptor: int) -> NextGeneration:
    """Read what ``pack`` wrote: it comes from the master, the worker's own parent. Closes the descriptor."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        generation = pickle.load(file)  # noqa: S301 - written by our own parent, into memory that nobody else has
    assert isinstance(generation, NextGeneration)
    return generation
