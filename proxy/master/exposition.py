"""The Prometheus text format 0.0.4: families of samples to text."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "reverse_proxy_"

Labels = Mapping[str, object]
Sample = tuple[Labels, float]
_NO_LABELS: Labels = {}


class Exposition:
    """Collects families; each name once, its samples together, as the format demands."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def counter(self, name: str, text: str, samples: Iterable[Sample] | float) -> None:
        """A number that only grows; ``name`` ends in ``_total`` and has no prefix yet."""
        self._family(name, "counter", text, samples)

    def gauge(self, name: str, text: str, samples: Iterable[Sample] | float) -> None:
        """A number that holds now."""
        self._family(name, "gauge", text, samples)

    def histogram(
        self, name: str, text: str, bounds: tuple[float, ...], rows: Iterable[tuple[Labels, list[int], float]]
    ) -> None:
        """Of each row the labels, how many fell into each bucket (one more than ``bounds``), and the sum."""
        self._head(name, "histogram", text)
        ends = [*map(_number, bounds), "+Inf"]
        for labels, buckets, total in rows:
            shown = _shown(labels)
            before = f"{PREFIX}{name}_bucket{{{shown},le=" if shown else f"{PREFIX}{name}_bucket{{le="
            below = 0
            for end, found in zip(ends, buckets, strict=True):
                below += found
                self._lines.append(f'{before}"{end}"}} {below}')
            self._sample(f"{name}_sum", labels, total)
            self._sample(f"{name}_count", labels, below)

    def encode(self) -> bytes:
        """The whole text."""
        return ("\n".join(self._lines) + "\n").encode("utf-8")

    def _family(self, name: str, kind: str, text: str, samples: Iterable[Sample] | float) -> None:
        self._head(name, kind, text)
        for labels, value in [(_NO_LABELS, samples)] if isinstance(samples, int | float) else samples:
            self._sample(name, labels, value)

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += (f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}")

    def _sample(self, name: str, labels: Labels, value: float) -> None:
        shown = _shown(labels)
        self._lines.append(
            f"{PREFIX}{name}{{{shown}}} {_number(value)}" if shown else f"{PREFIX}{name} {_number(value)}"
        )


def _shown(labels: Labels) -> str:
    return ",".join([f'{key}="{_escaped(str(label))}"' for key, label in labels.items()])


@functools.lru_cache(maxsize=4096)
def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if type(value) is int else repr(int(value)) if value == int(value) else repr(value)
