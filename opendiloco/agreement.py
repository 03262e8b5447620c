"""What all workers of a run must have in common, as far as their records tell."""

from __future__ import annotations

from opendiloco.errors import SettingsError
from opendiloco.membership import Membership, Progress


def check_agreement(own: Progress, run_id: str, membership: Membership) -> None:
    """Compare a worker's record with the others'; where two cannot both be right, the one that started later gives way.

    Raises:
        SettingsError: another contract, model or initial parameters in the run, or another process with this key.
    """
    identity = membership.identity
    for peer, record in membership.view.items():
        if (record.started, peer) > (own.started, identity.peer_id):
            continue
        if record.contract != own.contract:
            raise SettingsError(
                f"run.id {run_id} is taken: peer {peer} runs it with another contract ({record.contract[:12]}, here "
                f"{own.contract[:12]}): leave out --run, or choose another run.id"
            )
        if record.layout != own.layout:
            raise SettingsError(
                f"the model of this peer has other parameters, or other frozen values, than that of peer {peer} in run "
                f"{run_id}: use the same files in model.name and model.start, and the same version of transformers"
            )
        if record.hashed_round == own.hashed_round == 0 and record.params_hash != own.params_hash:
            raise SettingsError(
                f"initial parameters {own.params_hash[:12]} differ from {record.params_hash[:12]} of peer {peer}: "
                f"use the same files in model.name and model.start, and the same versions of torch and transformers"
            )
    seen = membership.own
    if seen is not None and seen.session != own.session and seen.issued > own.started > seen.started:
        raise SettingsError(
            f"swarm.identity {identity.path} is in use by another process of the swarm: give each peer a folder "
            f"(--out) or key file of its own"
        )
