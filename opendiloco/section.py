"""What all groups of settings are made of: their base, and types that say what a value may be and in which unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class Unit:
    """Metadata of a number: what is counted."""

    name: str


@dataclass(frozen=True)
class Allowed:
    """Metadata of a text: what its pattern asks for, in words."""

    text: str


class Section(BaseModel):
    """A group of settings: frozen, typed, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


Seconds = Annotated[float, Field(gt=0), Unit("seconds")]
Decay = Annotated[float, Field(ge=0, lt=1)]
ListenAddress = Annotated[str, Field(pattern=r"^/[^\s/]+/\S+$"), Allowed("an address such as /ip4/0.0.0.0/tcp/31337")]
PeerAddress = Annotated[
    str,
    Field(pattern=r"^/\S+/p2p/\w+$"),
    Allowed("a full address such as /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo..."),
]
