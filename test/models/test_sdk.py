"""A provider's SDK is looked for before a run begins, and the message says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from recorded_run import FORWARD

from kernel_agent.config import Backend, RunConfig
from kernel_agent.errors import ExitCode
from kernel_agent.models import make_model
from kernel_agent.models.errors import MissingSdk

KEYS = {"OPENAI_API_KEY": "sk-1", "ANTHROPIC_API_KEY": "sk-ant-1"}


@pytest.mark.parametrize(("backend", "module"), [(Backend.OPENAI, "openai"), (Backend.ANTHROPIC, "anthropic")])
def test_a_missing_sdk_is_told_with_its_name_and_a_way_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend, module: str
) -> None:
    # It was an internal error at the first ask, after minutes of preparation.
    monkeypatch.setitem(sys.modules, module, None)
    file = tmp_path / "forward.py"
    file.write_text(FORWARD)
    with pytest.raises(MissingSdk, match=f"--backend {backend.value} needs {module}, which is not installed") as raised:
        make_model(RunConfig(file=file, backend=backend), tmp_path, environ=KEYS)
    assert raised.value.exit_code is ExitCode.ENVIRONMENT
    assert f"pip install {module}" in raised.value.remedy
    assert "--backend manual" in raised.value.remedy
