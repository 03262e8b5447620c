"""Real peers on loopback, as cheap as a claim allows (see `support`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import commands, make_contract, module_commands, text_file
from support.noisy import run_benchmark
from support.peers import IGNORED_WARNINGS, module_network, network, network_thread
from support.waiting import wait_until
from support.warm import warm

__all__ = [
    "commands",
    "make_contract",
    "module_commands",
    "module_network",
    "network",
    "network_thread",
    "run_benchmark",
    "text_file",
    "wait_until",
    "warm",
]


LONG = (
    "test_torchrun.py",
    "test_examples.py",
)  # first, so that no test process ends with one of them while others idle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
