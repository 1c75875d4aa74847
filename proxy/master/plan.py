"""What a configuration comes to on this host: effective listeners, the descriptor budget, and what `run` would meet.

Nothing here binds a port, so `check` can call all of it beside a running instance.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from proxy.budget import LOGS, Budget, Inputs, Limits, Verdict, arithmetic, calculate
from proxy.config.effective import effective_client_cap, effective_max_handshakes
from proxy.config.locate import Loc
from proxy.config.place import collected, faults_at, faults_under, raise_together
from proxy.config.schema import AUTO, RouteOptions, Settings, UpstreamTls
from proxy.errors import ConfigError, OperatorError, StartError
from proxy.master.listeners import ListenPlan, plan_listeners
from proxy.master.processors import available_processors
from proxy.tls.contexts import ListenerTls, UpstreamTrust, load_certificates, make_base_contexts, upstream_trust

_KERNEL_FOLDERS: Final = ("/proc", "/sys")


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration judged on this host. ``budget.verdict`` may be a refusal: see ``require_budget``."""

    settings: Settings
    listen: ListenPlan
    budget: Budget

    @property
    def workers(self) -> int:
        """The number of workers, ``"auto"`` replaced."""
        return self.budget.inputs.workers

    @property
    def max_handshakes(self) -> int:
        """Handshakes at the same time, over all workers."""
        return effective_max_handshakes(self.settings, self.budget.max_connections, self.workers)

    @property
    def client_cap(self) -> int:
        """Connections of one client, over all workers."""
        return effective_client_cap(self.settings, self.budget.max_connections)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The contexts, made once and before any fork, so that session tickets hold across workers.

    ``listeners`` in the order of the plan's https listeners.
    """

    listeners: tuple[ListenerTls, ...]
    upstream: Mapping[UpstreamTls, UpstreamTrust]


def make_plan(settings: Settings, limits: Limits) -> Plan:
    """Judge ``settings`` under ``limits``. Raises ConfigError for an address that cannot be read."""
    listen = plan_listeners(settings)
    return Plan(settings, listen, calculate(budget_inputs(settings, listen), limits))


def budget_inputs(settings: Settings, listen: ListenPlan) -> Inputs:
    """The budget's view of the settings; a listener that is off costs nothing."""
    health = 0 if listen.health is None else 1
    return Inputs(
        workers=available_processors() if settings.workers == AUTO else settings.workers,
        max_connections=settings.max_connections,
        max_upstream_connections=settings.max_upstream_connections,
        https_listeners=len(listen.https),
        redirect_listeners=len(listen.redirect),
        redirect_cap=settings.redirect.max_connections if listen.redirect else 0,
        health_cap=settings.health.max_connections * health,
        admin_cap=settings.admin.max_connections,
        control_listeners=health + 1,
        logs=LOGS,
    )


def require_budget(budget: Budget) -> None:
    """Raise ConfigError with the arithmetic when the budget is refused."""
    if budget.verdict is Verdict.REFUSED:
        with faults_at("max_connections"):
            raise ConfigError("\n".join([*budget.refusals, arithmetic(budget)]))


def require_state_dir(settings: Settings, listen: ListenPlan) -> None:
    """Raise ConfigError when a self-signed certificate is needed and could not be kept. Creates nothing."""
    if all(one.listener.certificates for one in listen.https):
        return
    folder = settings.state_dir
    while not os.path.exists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    usable = os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK) and not _is_the_kernels(folder)
    if not usable:
        with faults_at("state_dir"):
            raise ConfigError(
                f"state_dir = {settings.state_dir!r} cannot be written by uid {os.geteuid()}, and a listener without"
                " certificates keeps its self-signed one there: give it certificates, or set another state_dir"
            )


def _is_the_kernels(folder: str) -> bool:
    """Whether ``folder`` is on procfs or sysfs: nothing can be kept there, though root is told that it may write."""
    device = os.stat(folder).st_dev
    return any(os.path.isdir(one) and os.stat(one).st_dev == device for one in _KERNEL_FOLDERS)


def load_tls(plan: Plan, *, store: bool) -> TlsMaterial:
    """Load every certificate and trust store; with ``store`` false nothing is written.

    Raises ConfigError for what is missing, unreadable or does not match, StartError for a state folder that turns out
    to be unusable though `check` would take it; for several faults the first one, with the ``others``.
    """
    settings = plan.settings
    hosts = tuple(host for site in settings.sites for host in site.hosts)
    make_base_contexts()
    loaded = []
    upstream = {}
    faults: list[OperatorError] = []
    for number, one in enumerate(plan.listen.https):
        with collected(faults), faults_under("listeners", number):
            certificates = load_certificates(
                one.listener, label=str(one.address), site_hosts=hosts, state_dir=settings.state_dir, store=store
            )
            loaded.append(ListenerTls(certificates))
    if any(isinstance(fault, StartError) for fault in faults):
        faults = _with_state_dir_once(plan, faults)
    for options, key in _upstream_tls(settings).items():
        with collected(faults), faults_under(*key):
            upstream[options] = upstream_trust(options)
    raise_together(faults)
    return TlsMaterial(tuple(loaded), upstream)


def _with_state_dir_once(plan: Plan, faults: list[OperatorError]) -> list[OperatorError]:
    """Have the fault of state_dir, as `check` tells it, in place of the StartError of each listener that met it."""
    try:
        require_state_dir(plan.settings, plan.listen)
    except ConfigError as error:
        return [error, *(fault for fault in faults if not isinstance(fault, StartError))]
    return faults


def _upstream_tls(settings: Settings) -> dict[UpstreamTls, Loc]:
    """Each distinct way in which some route verifies an https upstream, with the table that first says so."""
    found: dict[UpstreamTls, Loc] = {}
    for index, site in enumerate(settings.sites):
        of_site: Loc = ("sites", index)
        tables: list[tuple[Loc, RouteOptions]] = [(of_site, site)]
        tables += [((*of_site, "routes", number), route) for number, route in enumerate(site.routes)]
        for key, options in tables:
            upstreams = site.upstreams if options.upstreams is None else options.upstreams
            tls, owner = (site.upstream_tls, of_site) if options.upstream_tls is None else (options.upstream_tls, key)
            if any(upstream.startswith("https:") for upstream in upstreams or ()):
                found.setdefault(tls or UpstreamTls(), (*owner, "upstream_tls"))
    return found
