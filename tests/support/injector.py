"""Faults of one peer in one phase of one round, through the seams between the parts of its network process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.peers import Peer

PHASES: dict[str, tuple[str, str]] = {
    "arrive": ("_presence", "arrive"),
    "gather": ("_rendezvous", "gather"),
    "reduce": ("_groups", "reduce"),
    "log": ("_donor", "remember"),
    "commit": ("_donor", "settle"),
    "announce": ("_presence", "set_params_hash"),
}
"""In the order of a round, and the call with which each begins."""


def inject(peer: Peer, *, round: int, phase: str, fault: Callable[[], object]) -> None:
    """Let `fault` happen when `peer` comes to `phase` of the round after which it has `round` of them."""
    part_name, name = PHASES[phase]
    part = getattr(peer.process._participation, part_name)
    call: Callable[..., Any] = getattr(part, name)
    last_before = round if phase in ("commit", "announce") else round - 1  # what the peer stands at by then

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if peer.process._presence.position.round == last_before:
            setattr(part, name, call)
            fault()
        return call(*arguments, **named)

    setattr(part, name, wrapped)
