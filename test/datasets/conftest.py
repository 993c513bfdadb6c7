"""One sandbox for all pairs, whose server imports at once what each of their children needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel_agent.collection.proof import CHILDREN
from kernel_agent.sandbox import Sandbox


@pytest.fixture(scope="session")
def pair_sandbox() -> Iterator[Sandbox]:
    """As `sandbox`, for hundreds of pairs."""
    with Sandbox(CHILDREN) as shared:
        yield shared
