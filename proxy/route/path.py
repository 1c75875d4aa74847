"""The one form of a request path that routing sees and that is forwarded.

Two spellings of one path that two programs could read differently are how a route's guard is walked around, so the
path is brought to the normal form of RFC 3986 (sections 6.2.2.1 to 6.2.2.3) before it is matched, and what was
matched is what the upstream gets:

- ``%41`` becomes ``A`` (unreserved characters are decoded), ``%c3`` becomes ``%C3``;
- ``.`` and ``..`` segments, also spelled ``%2e``, are resolved (section 5.2.4);
- empty segments (``//``) are kept: RFC 3986 gives them a meaning of their own;
- the query (from the first ``?``) is kept byte for byte.

Refused, since upstreams disagree on them: an encoded slash, backslash or NUL, a raw backslash, a malformed escape,
and ``..`` that would climb above the root (which section 5.2.4 would silently drop).
"""

from __future__ import annotations

import re
from typing import Final

# No two parts can take the same byte: the time is linear in the length.
_PLAIN: Final = re.compile(rb"/[^?%\\#\x00-\x20\x7f]*+(?:\?.*+)?", re.DOTALL)
_FORBIDDEN: Final = re.compile(rb"[\\#\x00-\x20\x7f]")
_ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})?")

# RFC 3986 section 2.3.
_UNRESERVED: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_REFUSED_WHEN_ENCODED: Final = {
    ord("/"): "encoded-slash",
    ord("\\"): "encoded-backslash",
    0: "encoded-nul",
}


class PathError(ValueError):
    """The path has no single meaning; answered with 400.

    ``reason`` is a slug of a closed set: ``not-absolute``, ``invalid-character``, ``raw-backslash``,
    ``malformed-escape``, ``encoded-slash``, ``encoded-backslash``, ``encoded-nul``, ``escapes-root``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason: Final = reason


def normalize_path(path: bytes) -> bytes:
    """Return the normal form of ``path``, an origin-form target (RFC 9112 section 3.2.1) with its optional query.

    A path in normal form comes back as the same object; the function is idempotent. ``b"*"`` (the asterisk-form of
    OPTIONS) passes as it is. Raises ``PathError``.
    """
    # "/." is the beginning of every dot segment, and rare.
    if b"/." not in path and _PLAIN.fullmatch(path):
        return path
    if path == b"*":
        return path
    if not path.startswith(b"/"):
        raise PathError("not-absolute")
    raw, mark, query = path.partition(b"?")
    forbidden = _FORBIDDEN.search(raw)
    if forbidden:
        raise PathError("raw-backslash" if forbidden[0] == b"\\" else "invalid-character")
    # Escapes first: an encoded dot counts as a dot.
    normal = _remove_dot_segments(_ESCAPE.sub(_decode, raw))
    return path if normal == raw else normal + mark + query


def _decode(escape: re.Match[bytes]) -> bytes:
    digits = escape[1]
    if digits is None:
        raise PathError("malformed-escape")
    value = int(digits, 16)
    if value in _UNRESERVED:
        return bytes((value,))
    if value in _REFUSED_WHEN_ENCODED:
        raise PathError(_REFUSED_WHEN_ENCODED[value])
    return escape[0].upper()


def _remove_dot_segments(path: bytes) -> bytes:
    segments = path.split(b"/")[1:]
    kept: list[bytes] = []
    for segment in segments:
        if segment == b"..":
            if not kept:
                raise PathError("escapes-root")
            kept.pop()
        elif segment != b".":
            kept.append(segment)
    if segments[-1] in (b".", b".."):
        # "/a/." and "/a/b/.." both name the folder "/a/" (RFC 3986 section 5.4.1).
        kept.append(b"")
    return b"/" + b"/".join(kept)
