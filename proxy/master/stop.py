"""`reverse-proxy stop`: asks the running instance to drain, and waits until it has ended."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from typing import TextIO

from proxy.errors import StartError
from proxy.master.status_client import fetch_status


def stop(paths: Sequence[str], stream: TextIO) -> None:
    """SIGTERM to the master of the instance that answers on one of ``paths``; returns when it is gone.

    Raises StartError when nobody answers, with where it looked, or the signal is not allowed.
    """
    pid = int(fetch_status(paths)["pid"])
    try:
        handle = os.pidfd_open(pid)  # from here on another process with this number cannot be meant
    except ProcessLookupError:
        raise StartError(f"the instance that answered (pid {pid}) has ended by itself, or is in a container") from None
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        print(f"reverse-proxy (pid {pid}) drains", file=stream, flush=True)
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        ended.poll()
    except PermissionError:
        raise StartError(f"cannot stop pid {pid}: it belongs to another user") from None
    finally:
        os.close(handle)
    print("ended", file=stream, flush=True)
