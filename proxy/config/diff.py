"""What differs between two configurations, in the words of the file, for the answer to a reload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import BaseModel

from proxy.config.effective import effective_listeners, effective_redirect_addresses
from proxy.config.refusal import shown
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

_MAX_SHOWN_ELEMENTS: Final = 6

_TOLD_APART = frozenset({"listeners", "sites", "redirect.addresses"})
"""Keys whose changes have lines of their own."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Names of what was added, removed and changed. Empty where nothing differs."""

    sites_added: tuple[str, ...] = ()
    sites_removed: tuple[str, ...] = ()
    sites_changed: tuple[str, ...] = ()
    """With what is other in them."""
    listeners_added: tuple[str, ...] = ()
    listeners_removed: tuple[str, ...] = ()
    listeners_changed: tuple[str, ...] = ()
    certificates_changed: tuple[str, ...] = ()
    """Addresses of listeners whose certificates are other ones, be it in the same files."""
    limits_changed: tuple[str, ...] = ()
    """All other keys, with both values."""
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
        sites_changed=tuple(
            f"{name}: {', '.join(_differing(old_sites[name], site))}"
            for name, site in new_sites.items()
            if name in old_sites and site != old_sites[name]
        ),
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
            f"{key}: {_changed(_value(old, key), _value(new, key))}"
            for key in _keys(new)
            if key not in _TOLD_APART and not _is_not_live(key) and _value(old, key) != _value(new, key)
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


def _differing(old: Site, new: Site) -> list[str]:
    """The keys of a site that differ; of its routes, their paths."""
    keys = [key for key in Site.model_fields if key != "routes" and getattr(old, key) != getattr(new, key)]
    before, after = ({route.path: route for route in site.routes} for site in (old, new))
    paths = dict.fromkeys((*before, *after))
    return [*keys, *(f"route {path}" for path in paths if before.get(path) != after.get(path))] or ["routes"]


def _keys(settings: Settings) -> list[str]:
    """Every key, those of tables with the table's name before them."""
    keys: list[str] = []
    for key in Settings.model_fields:
        value = getattr(settings, key)
        keys += [f"{key}.{part}" for part in type(value).model_fields] if isinstance(value, BaseModel) else [key]
    return keys


def _is_not_live(key: str) -> bool:
    return key in NOT_LIVE or key.partition(".")[0] in NOT_LIVE


def _value(settings: Settings, key: str) -> object:
    value: object = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _changed(old: object, new: object) -> str:
    """Both values; of long arrays how many there are and what is other in them."""
    if not (isinstance(old, tuple) and isinstance(new, tuple) and max(len(old), len(new)) > _MAX_SHOWN_ELEMENTS):
        return f"{_shown(old)} -> {_shown(new)}"
    before, after = dict.fromkeys(old), dict.fromkeys(new)
    added, removed = ([one for one in some if one not in other] for some, other in ((after, before), (before, after)))
    parts = [f"{what} {_some(elements)}" for what, elements in (("added", added), ("removed", removed)) if elements]
    return f"{len(old)} -> {len(new)} values, {', '.join(parts) or 'in another order'}"


def _some(elements: list[object]) -> str:
    more = len(elements) - _MAX_SHOWN_ELEMENTS
    shown_ones = ", ".join(_shown(one) for one in elements[:_MAX_SHOWN_ELEMENTS])
    return shown_ones if more <= 0 else f"{shown_ones} and {more} more"


def _shown(value: object) -> str:
    """As TOML has it; a key that is left out is its default."""
    if value is None:
        return "default"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"[{', '.join(_shown(one) for one in value)}]"
    if isinstance(value, BaseModel):
        value = {key: getattr(value, key) for key in type(value).model_fields if key in value.model_fields_set}
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{key} = {_shown(one)}" for key, one in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return shown(value)
