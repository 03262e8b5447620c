"""What a process may use is what it has, not what the machine has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opendiloco import machine
from opendiloco.machine import available_bytes, cores


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the kernel says of this process's control group."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)

    def say(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)

    return say


def test_cores_are_those_that_this_process_may_run_on(container: Callable[..., None]) -> None:
    before = os.sched_getaffinity(0)
    assert cores() == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("limit", "count"), [("max 100000", None), ("150000 100000", 2), ("5000 100000", 1), ("", None)]
)
def test_a_container_has_as_many_cores_as_its_share_fills(
    container: Callable[..., None], limit: str, count: int | None
) -> None:
    container(cpu_max=limit)
    there = len(os.sched_getaffinity(0))
    assert cores() == min(there, count or there)


def test_memory_is_what_is_left_of_the_containers(container: Callable[..., None]) -> None:
    container(memory_max="max", memory_current="5")
    assert available_bytes() > 10**7
    container(memory_max="1000", memory_current="400")
    assert available_bytes() == 600
    container(memory_max="1000", memory_current="400", memory_stat="anon 100\ninactive_file 250\n")
    assert available_bytes() == 850
    container(memory_max="1000", memory_current="1400", memory_stat="")
    assert available_bytes() == 0
