"""What the tables of the schema are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from proxy.config.names import normalize_network

# The titles name the types in the reference and in messages.
Seconds = Annotated[float, Field(gt=0, le=604_800, allow_inf_nan=False, title="seconds")]
"""A time in seconds, at most a week; 0 is not 'off' but an error."""
Network = Annotated[str, AfterValidator(normalize_network), Field(title="IP address or network")]


class Model(BaseModel):
    """Base of every table: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
