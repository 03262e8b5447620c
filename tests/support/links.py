"""Links between peers that can be slow, stalled or cut: see `benchmarks.links`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.links import Host, Links

__all__ = ["Host", "Links", "links"]


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links()
    yield links
    links.close()
