"""The full suite and the compile for sm_90, for every pair without a record and those whose turn it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from pair_turns import FULL

from kernel_agent.collection.proof import judge
from kernel_agent.sandbox import Sandbox

DUE = [pytest.param(path, id=f"{path.parent.name}-{path.stem}-{why}") for path, why in FULL.items()]


@pytest.mark.parametrize("path", DUE)
def test_pair_passes_all_that_dataset_check_asks(path: Path, pair_sandbox: Sandbox):
    verdict = judge(path, pair_sandbox)
    assert verdict.green, f"{verdict.status.value}: {verdict.message} {'; '.join(verdict.problems)}"
