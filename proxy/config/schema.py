"""What the operator can say: frozen, typed, units in the names.

Every field's ``description`` is the text of the reference (docs/configuration.md and the JSON Schema in deploy/),
so it is written for operators. What concerns more than one table is in ``checks.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from proxy.config.address import parse_address
from proxy.config.model import Model, Network, Seconds
from proxy.config.names import (
    check_field_name,
    check_field_value,
    check_protocol,
    check_protocols,
    check_request_fields,
    normalize_dns_name,
    normalize_host,
)
from proxy.config.paths import (
    check_absolute_path,
    check_log_path,
    check_redirect_target,
    check_socket_path,
    normalize_route_path,
    resolve_file,
)
from proxy.config.pressure import NetworkList, RateLimit
from proxy.config.refusal import RefusedError, shown
from proxy.config.upstream_address import parse_upstream

AUTO: Final = "auto"
MAX_CONNECTIONS_LIMIT: Final = 1_000_000
MAX_WORKERS: Final = 256
_MAX_UID: Final = 2**32 - 2
_MAX_USER_CHARS: Final = 256
_MAX_INT64: Final = 2**63 - 1
_MAX_RATE: Final = 1_000_000_000


def _count_or_auto(value: object, most: int) -> object:
    if value == AUTO or (type(value) is int and 1 <= value <= most):
        return value
    hint = ""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        hint = f"write {value} without quotes"
    elif isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        hint = f"write {value:.0f}"
    raise RefusedError(shown(value), f'an integer from 1 to {most}, or "auto"', hint)


def _connections(value: object) -> object:
    return _count_or_auto(value, MAX_CONNECTIONS_LIMIT)


def _workers(value: object) -> object:
    return _count_or_auto(value, MAX_WORKERS)


def _user_or_group(value: object) -> object:
    if (isinstance(value, str) and 0 < len(value) <= _MAX_USER_CHARS) or (
        type(value) is int and 0 <= value <= _MAX_UID
    ):
        return value
    raise RefusedError(shown(value), f"a name, or an id from 0 to {_MAX_UID}")


def _file(text: str, info: ValidationInfo) -> str:
    return resolve_file(text, (info.context or {}).get("base_dir"))


Connections = Annotated[int, Field(ge=1, le=MAX_CONNECTIONS_LIMIT)]
ListenAddress = Annotated[
    str, AfterValidator(lambda text: str(parse_address(text))), Field(title="IP address and port")
]
Host = Annotated[str, AfterValidator(normalize_host), Field(title="host")]
Upstream = Annotated[str, AfterValidator(lambda text: str(parse_upstream(text))), Field(title="upstream")]
FieldName = Annotated[str, AfterValidator(check_field_name), Field(title="field name")]
FieldValue = Annotated[str, AfterValidator(check_field_value), Field(title="field value")]
RoutePath = Annotated[str, AfterValidator(normalize_route_path), Field(title="URL path")]
UserOrGroup = Annotated[
    Annotated[str, Field(title="name")] | Annotated[int, Field(ge=0, le=_MAX_UID)],
    BeforeValidator(_user_or_group),
]
File = Annotated[str, AfterValidator(_file), Field(title="file")]


class Certificate(Model):
    """A certificate and its key, both PEM. Relative paths are taken from the configuration file's folder."""

    chain: File = Field(
        description="The certificate, followed by its intermediate certificates.",
        examples=["/etc/reverse-proxy/tls/fullchain.pem"],
    )
    key: File = Field(
        description="Its private key. An encrypted key is an error, never a prompt.",
        examples=["/etc/reverse-proxy/tls/privkey.pem"],
    )


class Listener(Model):
    """An address that serves HTTPS."""

    address: ListenAddress = Field(
        description="Where to listen. `[::]` takes IPv6 only; write a second listener for IPv4.",
        examples=["0.0.0.0:443", "[::]:443"],
    )
    certificates: tuple[Certificate, ...] = Field(
        (),
        description=(
            "Chosen by the server name that the client asks for; the first also serves clients that ask for none. "
            "Without any, a self-signed certificate is made on the spot, and start and status say so."
        ),
    )
    min_tls_version: Literal["1.2", "1.3"] = Field(
        "1.2", description='The lowest TLS version accepted. "1.2" still serves every client of the last ten years.'
    )
    protocols: Annotated[tuple[Literal["h2", "http/1.1"], ...], AfterValidator(check_protocols)] = Field(
        ("h2", "http/1.1"),
        description=(
            'What clients may choose from by ALPN, in order of preference. Without `"h2"` there is no HTTP/2; '
            '`"http/1.1"` cannot be left out, since clients without ALPN speak it.'
        ),
    )


class Redirect(Model):
    """Plain HTTP that sends clients to HTTPS (308), to hosts of the sites only: with `"*"` that is any host."""

    enabled: bool = Field(True, description="`false`: nothing listens for plain HTTP.")
    addresses: tuple[ListenAddress, ...] = Field(
        ("0.0.0.0:80", "[::]:80"),
        min_length=1,
        description="Where to listen. The default IPv6 address is skipped with a warning where IPv6 is absent.",
    )
    max_connections: Connections = Field(
        64,
        description=(
            "Connections at the same time, over all workers; not counted in the top-level `max_connections`. "
            "Few, because a redirect is answered and closed at once."
        ),
    )
    https_port: int | None = Field(
        None,
        ge=1,
        le=65_535,
        description=(
            "The port that clients are sent to. Set it where it differs from the port listened on, as behind a port "
            "mapping. Left out: the port of the first listener."
        ),
    )


class Health(Model):
    """Plain HTTP for load balancers and monitoring; keep it on an internal address."""

    enabled: bool = Field(True, description="`false`: no health endpoint.")
    address: ListenAddress = Field(
        "127.0.0.1:9900", description="Where to listen. Loopback, since it has no access control."
    )
    max_connections: Connections = Field(32, description="Connections at the same time; a monitor needs one.")


class Admin(Model):
    """The socket that the command line talks to."""

    socket: Annotated[str, AfterValidator(check_socket_path), Field(title="absolute path")] = Field(
        "/run/reverse-proxy/admin.sock", description="Unix socket, at most 107 bytes long; only its owner may use it."
    )
    max_connections: Connections = Field(8, description="Connections at the same time; a command needs one.")


class HeaderEdit(Model):
    """Header fields to set and to remove. Fields of the connection and its framing, and Host, cannot be edited."""

    set: dict[FieldName, FieldValue] = Field(
        {},
        description="Field names and values; a field of the same name that was there is replaced.",
        examples=[{"X-Frame-Options": "DENY"}],
    )
    remove: tuple[FieldName, ...] = Field((), description="Names of fields to remove.", examples=[["Server"]])

    @model_validator(mode="after")
    def _each_name_once(self) -> HeaderEdit:
        seen: dict[str, str] = {}
        for name in (*self.set, *self.remove):
            other = seen.setdefault(name.lower(), name)
            if other is not name or (name in self.set and name in self.remove):
                raise RefusedError(
                    f"the field {shown(name)} twice",
                    "each field name once in set and remove",
                    "upper and lower case are alike",
                )
        return self


def _request_edit(edit: HeaderEdit) -> HeaderEdit:
    check_request_fields((*edit.set, *edit.remove))
    return edit


class UpstreamTls(Model):
    """How the certificate of an `https://` upstream is verified. Verification cannot be switched off."""

    ca: File | None = Field(
        None,
        description="PEM file of the authorities to trust, instead of the system's. For a self-signed one, itself.",
        examples=["/etc/reverse-proxy/tls/internal-ca.pem"],
    )
    server_name: Annotated[str, AfterValidator(lambda name: normalize_dns_name(name, name))] | None = Field(
        None,
        title="DNS name",
        description="The name asked for and verified. Left out: the upstream's host.",
        examples=["git.internal.example.org"],
    )


class PathRedirect(Model):
    """A path of the site that is answered with a redirect."""

    path: RoutePath = Field(
        description="The path and everything below it; among routes and redirects the longest wins.", examples=["/old"]
    )
    to: Annotated[str, AfterValidator(check_redirect_target)] = Field(
        title="URL",
        description="Where to. `{uri}` stands for the whole path and query asked for, from the first slash on.",
        examples=["https://www.example.org{uri}"],
    )
    status: Literal[301, 302, 303, 307, 308] = Field(
        308, description="308 is permanent and keeps the method; 307 is its temporary sibling."
    )


class RouteOptions(Model):
    """Keys that a site and each of its routes share; a route inherits what it does not say (None) from its site."""

    upstreams: tuple[Upstream, ...] | None = Field(
        None,
        min_length=1,
        description=(
            '`"http://host:port"`, `"https://host:port"` (its certificate is verified) or `"unix:/path"`. '
            "Names are resolved again every `resolve_interval_secs`, without a reload."
        ),
        examples=[["http://127.0.0.1:3000"]],
    )
    upstream_protocol: Literal["http/1.1", "h2"] | None = Field(
        None,
        description=(
            "What is spoken to the upstreams. `h2` is what gRPC needs: to `http://` and `unix:` without negotiation "
            "(h2c), to `https://` by ALPN, else 502. Streams that may be silent for long want longer "
            "`upstream_response_timeout_secs` and `request_body_timeout_secs`, `min_request_body_bytes_per_sec = 0`. "
            "WebSockets pass to `http/1.1` only."
        ),
    )
    balance: Literal["round_robin", "least_connections"] | None = Field(
        None, description="How one of several upstreams is chosen."
    )
    max_fails: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="So many failures in a row, and one of several upstreams is left out. A lone one never is.",
    )
    fail_timeout_secs: Seconds | None = Field(
        None, description="How long it is left out, and how long failures are remembered."
    )
    upstream_tls: UpstreamTls | None = Field(None, description="How `https://` upstreams are verified.")
    preserve_host: bool | None = Field(
        None, description="`true`: the upstream sees the client's Host. `false`: it sees its own address."
    )
    request_headers: Annotated[HeaderEdit, AfterValidator(_request_edit)] | None = Field(
        None, description="Edits of what the upstream gets. A route's table replaces its site's as a whole."
    )
    response_headers: HeaderEdit | None = Field(
        None, description="Edits of what the client gets. A route's table replaces its site's as a whole."
    )
    max_request_body_bytes: int | None = Field(
        None,
        ge=1,
        le=_MAX_INT64,
        description="A longer request body is refused with 413. Left out: unlimited, because bodies are streamed.",
    )
    upgrade_protocols: tuple[Annotated[str, AfterValidator(check_protocol)], ...] | None = Field(
        None, description="Protocols that a client may switch to; every other Upgrade is removed. `[]`: none."
    )
    upstream_connect_timeout_secs: Seconds | None = Field(None, description="As at the top level.")
    upstream_response_timeout_secs: Seconds | None = Field(
        None, description="As at the top level. Raise it where an upstream is silent for minutes before it answers."
    )
    tunnel_idle_timeout_secs: Seconds | None = Field(None, description="As at the top level.")
    request_body_timeout_secs: Seconds | None = Field(None, description="As at the top level.")
    write_timeout_secs: Seconds | None = Field(None, description="As at the top level.")
    min_request_body_bytes_per_sec: int | None = Field(None, ge=0, le=_MAX_RATE, description="As at the top level.")
    rate_limits: tuple[RateLimit, ...] | None = Field(
        None,
        description=(
            "How many requests may come, beside the limits of the top level: each one that applies must have a token. "
            "A route that inherits its site's shares their tokens with it."
        ),
    )
    max_upstream_requests: Connections | None = Field(
        None,
        description=(
            "Requests at the same time to these upstreams, over all workers. One more waits up to "
            "`upstream_queue_timeout_secs`, then is answered 503. Left out: only `max_upstream_connections` counts."
        ),
    )
    max_queued_requests: int | None = Field(
        None,
        ge=0,
        le=MAX_CONNECTIONS_LIMIT,
        description="Requests that may wait for `max_upstream_requests`, over all workers; one more is answered 503.",
    )


INHERITED_DEFAULTS: Final[dict[str, Any]] = {
    "upstream_protocol": "http/1.1",
    "balance": "round_robin",
    "max_fails": 3,
    "fail_timeout_secs": 10.0,
    "preserve_host": True,
    "upgrade_protocols": ("websocket",),
}
"""What holds where neither a route nor its site says anything; the timeouts come from the top level instead."""


class Route(RouteOptions):
    """A path of the site with options of its own; what it does not say it inherits from its site."""

    path: RoutePath = Field(
        description='The path and everything below it: "/api" matches /api, /api/x and /api?x, not /apix.',
        examples=["/api"],
    )


class Site(RouteOptions):
    """Host names and what is behind them."""

    hosts: tuple[Host, ...] = Field(
        min_length=1,
        description='Exact names, `"*.example.org"` (one or more labels in its place) or `"*"` (any host).',
        examples=[["git.example.org"]],
    )
    deny: NetworkList = Field(
        (),
        description="Clients that are answered 403: addresses, networks or lists of them, as at the top level.",
        examples=[["192.0.2.0/24"]],
    )
    allow: NetworkList = Field(
        (), description="Exceptions from `deny`; the more specific network decides.", examples=[["192.0.2.7"]]
    )
    routes: tuple[Route, ...] = Field((), description="Paths with options of their own.")
    redirects: tuple[PathRedirect, ...] = Field((), description="Paths that are answered with a redirect.")


class AccessLog(Model):
    """One line a request."""

    path: Annotated[str, AfterValidator(lambda text: check_log_path(text, ("stdout", "stderr", "off")))] = Field(
        "stdout", title="log", description='`"stdout"`, `"stderr"`, `"off"` or an absolute path.'
    )
    format: Literal["combined", "json"] = Field(
        "combined",
        description="`combined` adds to the well-known layout: host, duration, upstream time, request id, TLS version.",
    )


class EventLog(Model):
    """What happens to the proxy itself. The number of lines is bounded; suppressed ones are counted, never lost."""

    path: Annotated[str, AfterValidator(lambda text: check_log_path(text, ("stdout", "stderr")))] = Field(
        "stderr", title="log", description='`"stdout"`, `"stderr"` or an absolute path.'
    )
    format: Literal["text", "json"] = Field("text", description="`text` is `key=value` pairs; one record is one line.")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="The lowest level written.")
    max_lines_per_minute: int = Field(
        120, ge=10, le=1_000_000, description="Over all processes: no fault can fill a disk."
    )


class Drill(Model):
    """What `reverse-proxy drill` is judged by, in each of its rounds. Leaked permits or descriptors are never good."""

    min_good_percent: float = Field(
        99.0,
        ge=0,
        le=100,
        allow_inf_nan=False,
        title="percent",
        description="Good clients that must be served while it lasts.",
    )
    max_event_lines: int = Field(20, ge=1, le=1_000_000, description="Lines of the event log.")
    max_recovery_secs: Seconds = Field(
        2.0, description="From the return of the descriptors to the first good client that is served."
    )


class Settings(Model):
    """The whole configuration file."""

    max_connections: Annotated[Connections | Literal["auto"], BeforeValidator(_connections)] = Field(
        1024,
        description=(
            "Client connections of the whole appliance, over all listeners and workers. The file descriptors that they "
            'need are proven at start. `"auto"`: the most that the descriptor limit allows.'
        ),
    )
    max_upstream_connections: Connections | None = Field(
        None,
        description=(
            "Connections to upstreams, over all workers. Left out: as many as `max_connections`, so that no client "
            "waits. A request that gets none waits up to `upstream_queue_timeout_secs`, then is answered 503."
        ),
    )
    max_connections_per_client: Annotated[Connections | Literal["auto"], BeforeValidator(_connections)] = Field(
        AUTO,
        description=(
            "Client connections of one client, over all listeners and workers; one more is closed at once. A client is "
            'an address or, by the prefixes below, a network. `"auto"`: a quarter of `max_connections`, at least 16.'
        ),
    )
    client_prefix_ipv4: int = Field(
        32, ge=8, le=32, description="Leading bits of an IPv4 address that make a client: 32 is the address alone."
    )
    client_prefix_ipv6: int = Field(
        64, ge=16, le=128, description="The same of an IPv6 address: 64 is what a single customer usually has."
    )
    client_cap_exempt: tuple[Network, ...] = Field(
        ("127.0.0.0/8", "::1"),
        description=(
            "Addresses and networks that `max_connections_per_client` does not hold for: this host, known gateways of "
            "many users. Those of `trusted_proxies` are exempt anyway, since everybody comes from there."
        ),
        examples=[["192.0.2.0/24", "2001:db8::/32"]],
    )
    max_handshakes: Annotated[Connections | Literal["auto"], BeforeValidator(_connections)] = Field(
        AUTO,
        description=(
            "TLS handshakes at the same time, over all workers, so that a flood of them leaves room for whoever is "
            'connected. `"auto"`: half of `max_connections`, at least 64.'
        ),
    )
    eviction_grace_secs: Seconds = Field(
        1,
        description=(
            "When no connection is left for a newcomer, a client that owes its handshake or a request head for longer "
            "than this gives way; after those the longest idle one does. Never one with an exchange in progress."
        ),
    )
    workers: Annotated[Annotated[int, Field(ge=1, le=MAX_WORKERS)] | Literal["auto"], BeforeValidator(_workers)] = (
        Field(
            1,
            description=(
                "Processes that carry traffic; more than there are processors gain nothing. "
                '`"auto"`: one a processor that the proxy may use (affinity and cgroup quota), counted at start.'
            ),
        )
    )
    tls_handshake_timeout_secs: Seconds = Field(
        10,
        description="A client that has not finished its handshake by then is closed; it holds a connection meanwhile.",
    )
    header_timeout_secs: Seconds = Field(10, description="Inactivity while a request's head arrives; answered 408.")
    header_total_timeout_secs: Seconds = Field(
        60, description="The head as a whole, against clients that send a byte now and then; answered 408."
    )
    connection_idle_timeout_secs: Seconds = Field(
        60, description="A connection between two exchanges is closed after it."
    )
    request_body_timeout_secs: Seconds = Field(
        30, description="Inactivity while a request's body arrives; answered 408."
    )
    write_timeout_secs: Seconds = Field(
        30, description="Inactivity of a client that does not take its response; closed."
    )
    min_request_head_bytes_per_sec: int = Field(
        240,
        ge=0,
        le=_MAX_RATE,
        description="The least rate at which a request's head must come, after the grace; answered 408. 0: any rate.",
    )
    min_request_body_bytes_per_sec: int = Field(
        240,
        ge=0,
        le=_MAX_RATE,
        description=(
            "The same of its body: 408, or reset. It counts only while the client is waited for, and ends with the "
            "beginning of the response. 0: any rate."
        ),
    )
    min_response_bytes_per_sec: int = Field(
        240,
        ge=0,
        le=_MAX_RATE,
        description=(
            "The least rate at which a client must take its response, while there is something for it to take; reset. "
            "Tunnels are exempt. 0: any rate."
        ),
    )
    min_rate_grace_secs: Seconds = Field(
        10, description="A head, a body or a response may take so long before its rate counts."
    )
    upstream_connect_timeout_secs: Seconds = Field(
        5, description="Until an upstream has accepted, TLS included; then the next one is tried, or 504."
    )
    upstream_response_timeout_secs: Seconds = Field(
        60, description="Inactivity of an upstream that owes a response, or the rest of one; 504 if none has begun."
    )
    upstream_queue_timeout_secs: Seconds = Field(
        10, description="The wait for one of `max_upstream_connections`; then 503 with Retry-After."
    )
    max_queued_requests: int = Field(
        1024,
        ge=0,
        le=MAX_CONNECTIONS_LIMIT,
        description=(
            "Requests that may wait for an upstream connection, over all workers; one more is answered 503 at once."
        ),
    )
    upstream_idle_timeout_secs: Seconds = Field(
        60,
        description="An unused upstream connection is closed after it; stay below the upstream's own keep-alive time.",
    )
    tunnel_idle_timeout_secs: Seconds = Field(
        3600,
        description="Inactivity of both sides of a WebSocket or other tunnel. Long, because silence is normal there.",
    )
    drain_delay_secs: float = Field(
        0,
        ge=0,
        le=604_800,
        allow_inf_nan=False,
        title="seconds",
        description=(
            "At a stop, /readyz answers 503 for so long before anything is refused, so that a load balancer has taken "
            "this instance out by then."
        ),
    )
    upgrade_drain_timeout_secs: Seconds = Field(
        3600,
        description="After an upgrade, connections of the old generation may go on for so long; then they are cut off.",
    )
    drain_timeout_secs: Seconds = Field(
        30, description="At a stop, exchanges in flight may take so long to finish; then they are cut off."
    )
    worker_heartbeat_timeout_secs: Seconds = Field(
        30,
        description=(
            "A worker that has given no sign of life for so long is ended and replaced; "
            "the event log tells where it hung."
        ),
    )
    resolve_interval_secs: Seconds = Field(30, description="Upstreams' names are resolved again after it.")
    max_request_head_bytes: int = Field(
        32_768, ge=1024, le=1_048_576, description="Request line and header fields together; over it 431."
    )
    max_request_headers: int = Field(
        128, ge=16, le=1000, description="Number of a request's header fields; over it 431."
    )
    max_response_head_bytes: int = Field(
        65_536,
        ge=1024,
        le=1_048_576,
        description="Status line and header fields of an upstream's response; over it 502.",
    )
    underscores_in_headers: bool = Field(
        False,
        description=(
            "`false`: request fields with an underscore in the name are dropped and counted, because behind CGI "
            "`X_Y` and `X-Y` are the same variable."
        ),
    )
    trusted_proxies: tuple[Network, ...] = Field(
        (),
        description=(
            "Whose Forwarded, X-Real-IP and X-Forwarded-* fields are believed: addresses or networks of load balancers "
            "before this proxy. Everyone else's are replaced."
        ),
        examples=[["192.0.2.0/24"]],
    )
    deny: NetworkList = Field(
        (),
        description=(
            'Clients that are not served: addresses, networks, `"all"`, or `"file:/path"` for a list with one a '
            "line. Their connections are closed before TLS; those that `trusted_proxies` bring are answered 403."
        ),
        examples=[["192.0.2.0/24", "file:/etc/reverse-proxy/deny.txt"]],
    )
    allow: NetworkList = Field(
        (),
        description="Exceptions from `deny`; the more specific network decides.",
        examples=[["192.0.2.7"]],
    )
    rate_limits: tuple[RateLimit, ...] = Field(
        (), description="How many requests may come, over all sites. None: any number."
    )
    user: UserOrGroup | None = Field(
        None,
        description=(
            "Name or id of the user that workers and the control process become after a start as root. "
            "Otherwise ignored, with a warning."
        ),
        examples=["reverse-proxy"],
    )
    group: UserOrGroup | None = Field(
        None,
        description="Name or id of their group; its user's other groups stay. Needs `user`.",
        examples=["reverse-proxy"],
    )
    core_dumps: bool = Field(
        False, description="`true`: a process that crashes may leave a core file, with the private keys in it."
    )
    state_dir: Annotated[str, AfterValidator(check_absolute_path), Field(title="absolute path")] = Field(
        "/var/lib/reverse-proxy", description="Folder of what is kept over restarts, such as self-signed certificates."
    )
    listeners: tuple[Listener, ...] = Field(
        (),
        description=(
            "Left out: `0.0.0.0:443` and `[::]:443` with a self-signed certificate; the latter is skipped with a "
            "warning where IPv6 is absent."
        ),
    )
    redirect: Redirect = Field(Redirect(), description="Plain HTTP that sends clients to HTTPS.")
    health: Health = Field(Health(), description="The health endpoint.")
    admin: Admin = Field(Admin(), description="The socket of the command line.")
    sites: tuple[Site, ...] = Field((), description="Host names and what is behind them; at least one.")
    access_log: AccessLog = Field(AccessLog(), description="One line a request.")
    event_log: EventLog = Field(EventLog(), description="What happens to the proxy itself.")

    drill: Drill = Field(Drill(), description="The bars of `reverse-proxy drill`.")

    @property
    def upstream_connections(self) -> int | Literal["auto"]:
        """``max_upstream_connections``, or ``max_connections`` where that is left out."""
        own = self.max_upstream_connections
        return self.max_connections if own is None else own
