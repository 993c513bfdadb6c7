"""`Record`: what all records that are stored or travel between processes as JSON have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen, strict about unknown fields, infinities written as strings: what was written once reads back the same."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")
