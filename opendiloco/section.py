"""What all groups of settings are made of: their base, and types that say what a value may be and in which unit."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from opendiloco.errors import SettingsError


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

    @field_validator("*")
    @classmethod
    def _is_whole_text(cls, value: object) -> object:
        """A NUL ends a path or argument for the system, in the middle of what the user meant."""
        if any("\0" in text for text in (value if isinstance(value, tuple) else [value]) if isinstance(text, str)):
            raise PydanticCustomError("nul", "holds a NUL")
        return value

    def __init__(self, **values: Any) -> None:
        """Settings that a script makes, such as SwarmConfig(peers=[...]); SettingsError where they are wrong."""
        try:
            super().__init__(**values)
            return
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        raise SettingsError(_line(type(self), first["loc"], first["msg"], first["input"]))

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # what pydantic validates does not come here


def _line(section: type[Section], at: Sequence[int | str], message: str, value: object) -> str:
    """The error at one place of a section, as a line for the user."""
    if not at or message.startswith("Value error, "):  # a check of a whole section
        return message.removeprefix("Value error, ")
    key, info = str(at[0]), section.model_fields.get(str(at[0]))
    if info is not None and isinstance(info.annotation, type) and issubclass(info.annotation, Section):
        return _line(info.annotation, at[1:], message, value) if at[1:] else f"{key} is {shown(value)}: {message}"
    prefix = section.__name__.removesuffix("Config").lower() + "." if section.__name__.endswith("Config") else ""
    if info is not None:
        return f"{prefix}{key} is {shown(value)}: must be {allowed(info)}"
    near = difflib.get_close_matches(key, section.model_fields)
    cure = f"did you mean {prefix}{near[0]}?" if near else "`opendiloco settings` lists all of them"
    return f"unknown setting {prefix}{key}: {cure}"


Seconds = Annotated[float, Field(gt=0, le=1e9), Unit("seconds")]
Decay = Annotated[float, Field(ge=0, lt=1)]
ListenAddress = Annotated[str, Field(pattern=r"^/[^\s/]+/\S+$"), Allowed("an address such as /ip4/0.0.0.0/tcp/31337")]
PeerAddress = Annotated[
    str,
    Field(pattern=r"^/\S+/p2p/\w+$"),
    Allowed("a full address such as /ip4/203.0.113.5/tcp/31337/p2p/12D3Koo..."),
]


def allowed(info: FieldInfo) -> str:
    """The values that a setting takes, in words and with their unit."""
    return _allowed(info.annotation, info.metadata)


def shown(value: object) -> str:
    """A value as an error shows it: as JSON, and not too long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _allowed(annotation: Any, metadata: Sequence[object]) -> str:
    metadata = list(_flat(metadata))
    if words := [item.text for item in metadata if isinstance(item, Allowed)]:
        return words[0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return ", or ".join(_allowed(argument, ()) for argument in arguments)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin is tuple:
        least = [item.min_length for item in metadata if isinstance(item, MinLen)]
        most = [item.max_length for item in metadata if isinstance(item, MaxLen)]
        sizes = [f"at least {n}" for n in least] + [f"at most {n}" for n in most]
        size = f" of {least[0]} to {most[0]}" if least and most else "".join(f" of {words}" for words in sizes)
        form = f'["A", "B", ...]{size}' if arguments[-1] is Ellipsis else f"of {len(arguments)}"
        return f"a list {form}, each {_allowed(arguments[0], ())}"
    names = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    unit = "".join(f" of {item.name}" for item in metadata if isinstance(item, Unit))
    return names[annotation] + unit + "".join(_bounds(metadata))


def _flat(metadata: Sequence[object]) -> Iterator[object]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _bounds(metadata: Sequence[object]) -> Iterator[str]:
    words = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
    for item in metadata:
        if type(item) in words:
            name, word = words[type(item)]
            value = getattr(item, name)
            yield f", {word} {int(value) if value == int(value) else value}"
