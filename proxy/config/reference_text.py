"""The prose of docs/configuration.md; ``reference.py`` puts the tables between it."""

from __future__ import annotations

from typing import Final

EXAMPLE: Final = """\
max_connections = 800

[[listeners]]
address = "0.0.0.0:443"
certificates = [{ chain = "/etc/reverse-proxy/tls/fullchain.pem", key = "/etc/reverse-proxy/tls/privkey.pem" }]

[[sites]]
hosts = ["git.example.org"]
upstreams = ["http://127.0.0.1:3000"]
"""

INTRODUCTION: Final = f"""\
# Configuration

One TOML file, named with `--config`. Nothing in it is required but one site; every other key has a default that is
meant to be kept until there is a reason.

```toml
{EXAMPLE}```

`reverse-proxy check --config FILE` judges a file without touching a port: it prints every error of the file at once;
of a file without any, every error of what it asks of the host (certificates, logs, folders, descriptors), and the
arithmetic of the descriptor budget ([operations](operations.md#file-descriptor-budget)). It exits with 0 or 2.

```text
config.toml:1: unknown key `max_conections`: did you mean `max_connections`?
config.toml:4: listeners[0].address: found "localhost:443"; wanted an IP address and a port from 1 to 65535, such as
               "0.0.0.0:443" or "[::]:443"; write the address itself: 127.0.0.1 or [::1]
```

(Each error is one line; the second is folded here.) Indices count from 0: `sites[1]` is the second `[[sites]]`.

Every key, with comments, stands in [deploy/config.example.toml](../deploy/config.example.toml). Editors that know
JSON Schema for TOML (taplo, Even Better TOML) complete and check the file if its first line is

```toml
#:schema ./reverse-proxy.schema.json
```

with the path to [deploy/reverse-proxy.schema.json](../deploy/reverse-proxy.schema.json).
"""

SEMANTICS: Final = """\
## What the words mean

### A file is read at the start and at a reload

A [reload](operations.md#reload) takes over every key but `workers`, `user`, `group`, `core_dumps`, `state_dir`,
`health`, `admin`, `event_log.path` and `event_log.format`; where one of these differs it says so and keeps the old
value until a restart. Certificates and `upstream_tls.ca` are read again each time. Connections end with the values that
they began with.

### Times are inactivity, never totals

A time runs only while nothing moves, and starts again with every byte. A push of 3 GB that takes an hour passes every
default below, and so does a download to a slow client. Bounded as a whole is only what moves no bodies: the TLS
handshake, the head of a request (`header_total_timeout_secs`), connecting to an upstream or waiting for a connection
to one, and a drain; and a client must keep a least rate (`min_..._bytes_per_sec`,
[operations](operations.md#slow-clients)). `connection_idle_timeout_secs` runs only between exchanges. All times are
numbers of seconds (`0.5` is one), greater than 0 and at most 604800, a week. There is no value for "never".

### Connections are counted once

`max_connections` is the number of client connections of the whole appliance: all `[[listeners]]` and all workers
together. Each worker has its exact share, so the number can be no less than `workers`. The redirect, the health
endpoint and the admin socket have small counts of their own, which the descriptor budget adds.

### From a request to an upstream

1. **Host.** The exact name wins over a wildcard, the longest wildcard over a shorter one, and any of them over `"*"`.
   `"*.example.org"` matches `a.example.org` and `a.b.example.org`, not `example.org`. International names may be
   written either way; case does not matter. Sites are not bound to listeners.
2. **421 Misdirected Request** is the answer to a host that no site has, or that the certificate of the connection
   does not cover. A site with `hosts = ["*"]` takes every host and so switches both off.
3. **Path.** Of a site's routes and redirects the one with the longest path wins. A path matches whole segments:
   `/api` matches `/api`, `/api/x` and `/api?x`, not `/apix`. A slash at its end makes no difference. The order in the
   file makes none either.
4. **Everything else** goes to the site's own `upstreams`, or is answered 404 if it has none.

Paths are compared in normal form: `.` and `..` segments are resolved, percent-encoded letters, digits and `-._~` are
decoded. **The path that was matched is the path that is forwarded**, so that a proxy and an upstream never disagree
on it; the query is forwarded as it came. An encoded slash, backslash or NUL, and `..` that leaves the root, are
answered 400.

### What a route inherits

A route takes each key of "Sites and routes" below that it does not say from its site; what the site does not say
either has the default. Tables and arrays are inherited or replaced as a whole: a route with `request_headers` of its
own gets none of its site's. A route cannot lift a site's `max_request_body_bytes`, but may give a larger one.

### Redirects and `{uri}`

In `to`, `{uri}` stands for the path and query of the request, from the first slash on and with the route's own path
included: `to = "https://www.example.org{uri}"` sends `/old/a?b=c` to `https://www.example.org/old/a?b=c`. Without
`{uri}` everything is sent to one place. The host can never come from the client: `to = "/{uri}"` is an error.

### Who the client is

The fields Forwarded, X-Real-IP and X-Forwarded-* are believed when they come from `trusted_proxies`. Everyone else's
are replaced by what the connection shows.
"""

KEYS: Final = """\
## Keys

Keys of the top level stand before the first `[table]`: TOML gives every later one to the table above it.
"""

INHERITED: Final = """\
### Sites and routes

These keys may stand in `[[sites]]` and in `[[sites.routes]]`. The default is what holds where neither says anything.
"""

EDITS: Final = """\
### `[sites.request_headers]` and `[sites.response_headers]`

The same in a route: `[sites.routes.request_headers]`. Removing and setting happen after the proxy has removed what
belongs to the connection. Of a request, Forwarded, Via, X-Forwarded-For, -Host, -Port and -Proto, X-Real-IP and
X-Request-Id are the proxy's own and cannot be edited; other X-Forwarded-* fields can be set.
"""

LISTENERS: Final = """\
### `[[listeners]]`

Without any, the proxy listens on `0.0.0.0:443` and `[::]:443` (the latter is skipped with a warning where IPv6 is
absent), with a self-signed certificate.
"""

UPSTREAM_TLS: Final = """\
### `[sites.upstream_tls]`

The same in a route: `[sites.routes.upstream_tls]`.
"""

RATE_LIMITS: Final = """\
### `[[rate_limits]]`

The same in a site, `[[sites.rate_limits]]`, and in a route, `[[sites.routes.rate_limits]]`
([operations](operations.md#rate-limits)).
"""

TOP_LEVEL_GROUPS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (
        "Capacity",
        (
            "max_connections",
            "max_upstream_connections",
            "max_handshakes",
            "max_connections_per_client",
            "client_prefix_ipv4",
            "client_prefix_ipv6",
            "client_cap_exempt",
            "eviction_grace_secs",
            "workers",
        ),
    ),
    (
        "Times towards clients",
        (
            "tls_handshake_timeout_secs",
            "header_timeout_secs",
            "header_total_timeout_secs",
            "connection_idle_timeout_secs",
            "request_body_timeout_secs",
            "write_timeout_secs",
        ),
    ),
    (
        "Slow clients",
        (
            "min_request_head_bytes_per_sec",
            "min_request_body_bytes_per_sec",
            "min_response_bytes_per_sec",
            "min_rate_grace_secs",
        ),
    ),
    (
        "Times towards upstreams",
        (
            "upstream_connect_timeout_secs",
            "upstream_response_timeout_secs",
            "upstream_queue_timeout_secs",
            "max_queued_requests",
            "upstream_idle_timeout_secs",
            "resolve_interval_secs",
        ),
    ),
    (
        "Other times",
        (
            "tunnel_idle_timeout_secs",
            "drain_delay_secs",
            "drain_timeout_secs",
            "upgrade_drain_timeout_secs",
            "worker_heartbeat_timeout_secs",
        ),
    ),
    (
        "Messages",
        ("max_request_head_bytes", "max_request_headers", "max_response_head_bytes", "underscores_in_headers"),
    ),
    ("Who may come", ("deny", "allow")),
    ("Surroundings", ("trusted_proxies", "state_dir", "user", "group", "core_dumps")),
)
"""Headings and the top-level keys under them; tables have sections of their own."""

SECTIONS: Final[tuple[tuple[str, str | None], ...]] = (
    ("listeners", LISTENERS),
    ("listeners.certificates", None),
    ("sites", None),
    ("sites.routes", None),
    ("sites.redirects", None),
    ("sites.request_headers", EDITS),
    ("sites.upstream_tls", UPSTREAM_TLS),
    ("rate_limits", RATE_LIMITS),
    ("redirect", None),
    ("health", None),
    ("admin", None),
    ("access_log", None),
    ("event_log", None),
    ("drill", None),
)
"""Tables with a section, in the order of reading, with the start of the section where it is not the usual one."""
