"""What the sections of the config have in common. Used by `configs.schema` and those beside it."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

SECTION = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
