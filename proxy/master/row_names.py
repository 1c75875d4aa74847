"""Which names a configuration gives rows in the counters: what the master assigns at the start and at a reload."""

from __future__ import annotations

from typing import NamedTuple

from proxy.config.schema import Settings


class RowNames(NamedTuple):
    """For ``CounterBook`` and ``CounterBook.assign``; in the configuration's order, each once."""

    sites: tuple[str, ...]
    """A site's name is the first of its hosts, as in the route table."""
    backends: tuple[str, ...]


def row_names(settings: Settings) -> RowNames:
    """The sites and backends of ``settings``."""
    tables = (options for site in settings.sites for options in (site, *site.routes))
    return RowNames(
        tuple(dict.fromkeys(site.hosts[0] for site in settings.sites)),
        tuple(dict.fromkeys(upstream for options in tables for upstream in options.upstreams or ())),
    )
