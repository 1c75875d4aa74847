"""A TLS-terminating reverse proxy whose descriptor budget is proven before it starts."""

__version__ = "0.1.0"
