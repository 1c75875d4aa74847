"""What differs between two configurations, in the words of the file, for the answer to a reload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from proxy.config.effective import effective_listeners, effective_redirect_addresses
from proxy.config.schema import Settings, Site

NOT_LIVE = (
    "workers",
    "user",
    "group",
    "core_dumps",
    "state_dir",
    "health",
    "admin",
    "event_log.path",
    "event_log.format",
)
"""Keys that take effect with a restart (or an upgrade) only: what they shape is made before the workers are."""

_PER_LISTENER = ("listeners", "sites", "redirect")


@dataclass(frozen=True, slots=True)
class Changes:
    """Names of what was added, removed and changed. Empty where nothing differs."""

    sites_added: tuple[str, ...] = ()
    sites_removed: tuple[str, ...] = ()
    sites_changed: tuple[str, ...] = ()
    listeners_added: tuple[str, ...] = ()
    listeners_removed: tuple[str, ...] = ()
    listeners_changed: tuple[str, ...] = ()
    certificates_changed: tuple[str, ...] = ()
    """Addresses of listeners whose certificates are other ones, be it in the same files."""
    limits_changed: tuple[str, ...] = ()
    """Top-level keys, with both values."""
    needs_restart: tuple[str, ...] = ()
    """Keys that differ but cannot change live; the old values stay in force."""

    def as_dict(self) -> dict[str, list[str]]:
        """For JSON: the non-empty ones."""
        return {key: list(value) for key, value in asdict(self).items() if value}


def diff(old: Settings, new: Settings, certificates_changed: Iterable[str] = ()) -> Changes:
    """Compare; ``certificates_changed`` is what only the files can tell."""
    old_sites, new_sites = _by_name(old.sites), _by_name(new.sites)
    old_listeners = {str(one.address): one.listener for one in effective_listeners(old)}
    new_listeners = {str(one.address): one.listener for one in effective_listeners(new)}
    old_listeners_redirect = {f"{one.address} (redirect)" for one in effective_redirect_addresses(old)}
    new_listeners_redirect = {f"{one.address} (redirect)" for one in effective_redirect_addresses(new)}
    return Changes(
        sites_added=tuple(name for name in new_sites if name not in old_sites),
        sites_removed=tuple(name for name in old_sites if name not in new_sites),
        sites_changed=tuple(name for name, site in new_sites.items() if name in old_sites and site != old_sites[name]),
        listeners_added=(
            *(address for address in new_listeners if address not in old_listeners),
            *sorted(new_listeners_redirect - old_listeners_redirect),
        ),
        listeners_removed=(
            *(address for address in old_listeners if address not in new_listeners),
            *sorted(old_listeners_redirect - new_listeners_redirect),
        ),
        listeners_changed=tuple(
            address
            for address, listener in new_listeners.items()
            if address in old_listeners and listener != old_listeners[address]
        ),
        certificates_changed=tuple(certificates_changed),
        limits_changed=tuple(
            f"{key}: {_shown(getattr(old, key))} -> {_shown(getattr(new, key))}"
            for key in Settings.model_fields
            if key not in _PER_LISTENER and key not in _not_live_tables() and getattr(old, key) != getattr(new, key)
        ),
        needs_restart=tuple(key for key in NOT_LIVE if _value(old, key) != _value(new, key)),
    )


def keep_what_is_not_live(old: Settings, new: Settings) -> Settings:
    """``new`` with the values of ``old`` where a key cannot change live."""
    log = new.event_log.model_copy(update={"path": old.event_log.path, "format": old.event_log.format})
    tables = {key: getattr(old, key) for key in NOT_LIVE if "." not in key}
    return new.model_copy(update={**tables, "event_log": log})


def _by_name(sites: Iterable[Site]) -> dict[str, Site]:
    return {site.hosts[0]: site for site in sites}


def _not_live_tables() -> frozenset[str]:
    return frozenset(key for key in NOT_LIVE if "." not in key)


def _value(settings: Settings, key: str) -> object:
    value: object = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _shown(value: object) -> str:
    return "default" if value is None else str(value)
