"""Peer-to-peer DiLoCo training of language models on a hivemind DHT.

The names below are what one's own training loop needs; they are loaded on first use, because torch and hivemind
take seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opendiloco.callback import DiLoCoCallback as DiLoCoCallback
    from opendiloco.config import Contract as Contract
    from opendiloco.config import DataConfig as DataConfig
    from opendiloco.config import InnerConfig as InnerConfig
    from opendiloco.config import ModelConfig as ModelConfig
    from opendiloco.config import OuterConfig as OuterConfig
    from opendiloco.config import RoundsConfig as RoundsConfig
    from opendiloco.config import RunConfig as RunConfig
    from opendiloco.config import SwarmConfig as SwarmConfig
    from opendiloco.diloco import DiLoCo as DiLoCo
    from opendiloco.errors import OpendilocoError as OpendilocoError
    from opendiloco.errors import SettingsError as SettingsError
    from opendiloco.errors import SwarmError as SwarmError
    from opendiloco.report import RoundReport as RoundReport
    from opendiloco.swarm import Swarm as Swarm

_HOMES = {
    "callback": ("DiLoCoCallback",),
    "config": (
        "Contract",
        "DataConfig",
        "InnerConfig",
        "ModelConfig",
        "OuterConfig",
        "RoundsConfig",
        "RunConfig",
        "SwarmConfig",
    ),
    "diloco": ("DiLoCo",),
    "errors": ("OpendilocoError", "SettingsError", "SwarmError"),
    "report": ("RoundReport",),
    "swarm": ("Swarm",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
