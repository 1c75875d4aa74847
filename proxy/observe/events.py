"""The bounded reporter: what the other packages import."""

from __future__ import annotations

from proxy.observe.reporter import ChannelReporter, Reporter, open_channel

__all__ = ["ChannelReporter", "Reporter", "open_channel"]
