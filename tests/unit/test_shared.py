"""Vectors in an anonymous file: two processes see the same values, and nothing is left of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.shared import create_shared_memory, map_vectors

OTHER_SIDE = """
import json, sys, torch
from opendiloco.shared import map_vectors
vectors = map_vectors(int(sys.argv[1]), json.loads(sys.argv[2]))
for name, vector in vectors.items():
    print(name, vector.tolist())
    vector.add_(1)
"""


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = create_shared_memory()
    yield descriptor
    os.close(descriptor)


def test_another_process_reads_and_writes_the_same_values(memory: int) -> None:
    vectors = map_vectors(memory, {"theta": 3, "momentum": 0, "average": 2})
    vectors["theta"].copy_(torch.tensor([1.0, 2.0, 3.0]))
    sizes = '{"theta": 3, "momentum": 0, "average": 2}'
    command = [sys.executable, "-c", OTHER_SIDE, str(memory), sizes]
    seen = subprocess.run(command, pass_fds=[memory], capture_output=True, text=True, check=True).stdout
    assert seen.splitlines() == ["theta [1.0, 2.0, 3.0]", "momentum []", "average [0.0, 0.0]"]
    assert vectors["theta"].tolist() == [2.0, 3.0, 4.0]
    assert vectors["average"].tolist() == [1.0, 1.0]


@given(st.lists(st.integers(0, 3000), max_size=5))
def test_vectors_begin_as_zeros_and_do_not_touch_each_other(sizes: list[int]) -> None:
    descriptor = create_shared_memory()
    try:
        named = {f"v{index}": size for index, size in enumerate(sizes)}
        vectors, again = map_vectors(descriptor, named), map_vectors(descriptor, named)
        assert all(not vector.any() for vector in vectors.values())
        for value, (name, vector) in enumerate(vectors.items(), start=1):
            assert (vector.dtype, vector.numel(), vector.is_contiguous()) == (torch.float32, named[name], True)
            vector.fill_(value)
        for value, vector in enumerate(again.values(), start=1):
            assert bool((vector == value).all())
    finally:
        os.close(descriptor)


def test_mapping_again_with_more_keeps_what_is_there(memory: int) -> None:
    map_vectors(memory, {"a": 10})["a"].fill_(5)
    larger = map_vectors(memory, {"a": 10, "b": 100_000})
    assert larger["a"].tolist() == [5.0] * 10
    assert not larger["b"].any()


def test_vectors_outlive_the_descriptor(memory: int) -> None:
    copy = os.dup(memory)
    vector = map_vectors(copy, {"a": 4})["a"]
    os.close(copy)
    vector.fill_(1)
    assert map_vectors(memory, {"a": 4})["a"].tolist() == [1.0] * 4


def mappings() -> int:
    """How many mappings of such files this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:opendiloco")


def test_nothing_is_mapped_any_more_once_the_vectors_are_gone() -> None:
    gc.collect()
    before = mappings()
    descriptor = create_shared_memory()
    vectors = map_vectors(descriptor, {"a": 1000, "b": 1000})
    os.close(descriptor)
    assert mappings() > before
    del vectors
    gc.collect()
    assert mappings() == before


def test_it_is_no_file_in_dev_shm_which_containers_make_small(memory: int) -> None:
    map_vectors(memory, {"a": 1000})
    assert os.readlink(f"/proc/self/fd/{memory}").startswith("/memfd:")


def test_more_memory_than_there_can_be_is_an_oserror(memory: int) -> None:
    with pytest.raises(OSError, match=r"memory|large"):
        map_vectors(memory, {"a": 2**50})


def test_the_file_is_not_handed_to_processes_that_do_not_ask_for_it(memory: int) -> None:
    assert not os.get_inheritable(memory)
