"""A state that is kept while another one is written over it comes back bit for bit, or is known to be lost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.spare import Spare

SIZE = 10


def vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [*(torch.randn(SIZE, generator=generator) for _ in range(3)), torch.empty(0)]


@given(order=st.permutations(range(0, SIZE, 3)), kept=st.integers(0, 4))
def test_what_was_kept_comes_back_whatever_has_been_written_over_it(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], kept: int
) -> None:
    folder, state, before = tmp_path_factory.mktemp("spare"), vectors(), vectors()
    spare = Spare(state, folder)
    for start in [*order[:kept], *order[:kept]]:  # a chunk whose donor fails is fetched again
        chunk = slice(start, min(start + 3, SIZE))
        spare.keep(chunk)
        for vector in state:
            vector[chunk] = torch.nan
    assert spare.restore()
    assert all(torch.equal(here, there) for here, there in zip(state, before, strict=True))
    assert not list(folder.iterdir())


def test_without_room_the_state_is_lost_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = vectors()
    spare = Spare(state, tmp_path / "gone")
    with caplog.at_level(logging.WARNING):
        for start in (0, 3):
            spare.keep(slice(start, start + 3))
    assert not spare.restore()
    (message,) = caplog.messages
    assert "own state cannot be kept" in message
    assert message.endswith("make room")
