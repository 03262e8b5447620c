"""What all workers of a run must have in common, as far as their records tell.

A record is a claim of its owner, and anybody may own one. So a claim stops a worker only while neither its own rounds
nor those of others speak for it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from opendiloco.claims import Progress
from opendiloco.errors import SettingsError
from opendiloco.membership import Membership

logger = logging.getLogger(__name__)


class Agreement:
    """Compares a worker's record with those of the others."""

    def __init__(self, run_id: str, membership: Membership) -> None:
        self._run_id, self._membership = run_id, membership
        self._ignored: set[str] = set()
        self._compared = 0  # the last round whose hash has been found to differ

    def check(self, own: Progress, *, has_committed: bool) -> None:
        """Where two workers cannot both be right, the one that started later gives way.

        It ignores the other one, with a warning, once it has committed a round itself, or while most of the workers
        that stand on committed rounds agree with it.

        Raises:
            SettingsError: another contract, model or initial parameters in the run, or another process with this key.
        """
        self._check_key(own)
        view = self._membership.view
        differing = {peer: what for peer, record in view.items() if (what := _difference(own, record))}
        for peer, what in differing.items():
            if (view[peer].started, peer) > (own.started, self._membership.identity.peer_id):
                continue
            if not has_committed and not _is_backed(view, differing):
                raise SettingsError(self._refusal(own, peer, what))
            if peer not in self._ignored:
                self._ignored.add(peer)
                logger.warning("peer %s is ignored: its %s differs from that of run %s here", peer, what, self._run_id)

    def compare_states(self, own: Progress) -> None:
        """Warn where fewer workers have this one's outer state after its round than another, or no more."""
        if own.hashed_round != own.round or own.round == self._compared:
            return
        view, identity = self._membership.view, self._membership.identity
        hashes = list(state_hashes({**view, identity.peer_id: own}, own).values())
        alike, theirs = hashes.count(own.params_hash), [found for found in hashes if found != own.params_hash]
        usual = usual_hash(theirs)
        if usual is None or (others := theirs.count(usual)) < alike:
            return
        self._compared = own.round
        logger.warning(
            "the outer state of this worker after round %d is another than the others': its hash is %s (%d of %d "
            "workers), theirs %s (%d): %s with an empty folder (--out), so that it fetches the state",
            own.round,
            own.params_hash[:12],
            alike,
            len(hashes),
            usual[:12],
            others,
            "start this worker again" if others > alike else "one of them is wrong, start that worker again",
        )

    def _check_key(self, own: Progress) -> None:
        seen, identity = self._membership.own, self._membership.identity
        if seen is not None and seen.session != own.session and seen.issued > own.started > seen.started:
            raise SettingsError(
                f"swarm.identity {identity.path} is in use by another process of the swarm: give each peer a folder "
                f"(--out) or key file of its own"
            )

    def _refusal(self, own: Progress, peer: str, what: str) -> str:
        record = self._membership.view[peer]
        if what == "contract":
            return (
                f"run.id {self._run_id} is taken: peer {peer} runs it with another contract ({record.contract[:12]}, "
                f"here {own.contract[:12]}): leave out --run, or choose another run.id"
            )
        if what == "model":
            return (
                f"the model of this peer has other parameters, or other frozen values, than that of peer {peer} in run "
                f"{self._run_id}: use the same files in model.name and model.start, and the same version of "
                f"transformers"
            )
        return (
            f"initial parameters {own.params_hash[:12]} differ from {record.params_hash[:12]} of peer {peer}: "
            f"use the same files in model.name and model.start, and the same versions of torch and transformers"
        )


def _difference(own: Progress, record: Progress) -> str:
    """What two workers do not have in common, if they should."""
    if record.contract != own.contract:
        return "contract"
    if record.layout != own.layout:
        return "model"
    if record.hashed_round == own.hashed_round == 0 and record.params_hash != own.params_hash:
        return "initial parameters"
    return ""


def _is_backed(view: Mapping[str, Progress], differing: Mapping[str, str]) -> bool:
    """Whether most of the workers that stand on committed rounds do not differ from this one."""
    standing = [peer for peer, record in view.items() if record.committed_tokens > 0]
    return 2 * sum(peer in differing for peer in standing) < len(standing)


def state_hashes(records: Mapping[str, Progress], at: Progress) -> dict[str, str]:
    """What the workers that stand where `at` does announce as the hash of that state, by peer. Hashes lag behind."""
    place = at.contract, at.layout, at.lineage, at.round
    return {
        peer: record.params_hash
        for peer, record in records.items()
        if (record.contract, record.layout, record.lineage, record.round) == place
        and record.hashed_round == record.round
    }


def usual_hash(hashes: Iterable[str]) -> str | None:
    """The one that most have; of several the same one for everybody."""
    counts = Counter(hashes)
    return max(counts, key=lambda found: (counts[found], found), default=None)
