"""What the master tells about a start: to the event log, and to the control process for the status document."""

from __future__ import annotations

import os

from proxy import __version__
from proxy.budget import to_dict, verdict_text
from proxy.master.listeners import bound_address
from proxy.master.plan import Plan, TlsMaterial
from proxy.master.privileges import ignored
from proxy.master.sockets import BoundSockets
from proxy.observe.events import Reporter


def report_start(reporter: Reporter, plan: Plan, tls: TlsMaterial) -> None:
    """What an operator should know before traffic comes: the raised limit, warnings, self-signed certificates."""
    budget = plan.budget
    if budget.raise_to is not None:
        reporter.report(
            "limit.raised",
            f"soft descriptor limit raised from {budget.limits.soft} to {budget.raise_to}",
            level="info",
            hard="unlimited" if budget.limits.hard is None else budget.limits.hard,
        )
    for warning in budget.warnings:
        reporter.report("limit.low", warning, level="warning")
    if without_effect := ignored(plan.settings):
        reporter.report("user.ignored", without_effect, level="warning")
    for skipped in plan.listen.skipped:
        reporter.report("listener.skipped", skipped, level="warning")
    for one, material in zip(plan.listen.https, tls.listeners, strict=True):
        for warning in material.warnings:
            reporter.report("certificate.warning", warning, level="warning", listener=str(one.address))
    self_signed = [
        str(one.address) for one, material in zip(plan.listen.https, tls.listeners, strict=True) if material.self_signed
    ]
    if self_signed:
        reporter.report(
            "certificate.self_signed",
            "no certificate configured: a self-signed one is served, which clients do not trust",
            level="warning",
            listeners=" ".join(self_signed),
        )


def report_ready(reporter: Reporter, plan: Plan, bound: BoundSockets) -> None:
    """The one line that says what serves where."""
    reporter.report(
        "started",
        f"reverse-proxy {__version__} is ready",
        level="info",
        listeners=" ".join(bound.label(one.address) for one in plan.listen.https),
        redirect=" ".join(bound.label(address) for address in plan.listen.redirect) or "off",
        health="off" if bound.health is None else str(bound_address(bound.health)),
        workers=plan.workers,
        permits=plan.budget.max_connections,
        upstream_permits=plan.budget.max_upstream_connections,
        budget=verdict_text(plan.budget),
    )


def status_facts(plan: Plan, tls: TlsMaterial, bound: BoundSockets) -> dict[str, object]:
    """The part of the status document that does not change while this configuration runs."""
    shown: list[dict[str, object]] = [
        {
            "kind": "https",
            "address": bound.label(one.address),
            "self_signed": material.self_signed,
            "certificates": [
                {"names": list(info.names), "not_after": info.not_after.isoformat(), "path": info.path}
                for info in material.certificates
            ],
        }
        for one, material in zip(plan.listen.https, tls.listeners, strict=True)
    ]
    shown += [{"kind": "redirect", "address": bound.label(address)} for address in plan.listen.redirect]
    if bound.health is not None:
        shown.append({"kind": "health", "address": str(bound_address(bound.health))})
    shown.append({"kind": "admin", "address": f"unix:{plan.settings.admin.socket}"})
    return {
        "version": __version__,
        "pid": os.getpid(),
        "permits": plan.budget.max_connections,
        "upstream_permits": plan.budget.max_upstream_connections,
        "listeners": shown,
        "budget": to_dict(plan.budget),
    }
