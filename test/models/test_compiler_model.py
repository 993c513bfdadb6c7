"""The compiler as a source of replies: the nth best pair answers the nth ask, and what cannot be derived says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.agent.reply import extract
from kernel_agent.errors import ExitCode
from kernel_agent.models.compiler import CompilerModel, NothingDerived
from kernel_agent.models.protocol import Conversation

SWIGLU = Path(__file__).parents[2] / "examples" / "swiglu.py"
ASK = Conversation(system="", turns=())


def test_replies_are_the_derived_pairs_and_then_no_more(tmp_path: Path) -> None:
    model = CompilerModel(SWIGLU, tmp_path)
    assert model.limit >= 2, "a schedule with stores, and the plain one with atomics"
    asked = [model.ask(ASK, number=number) for number in range(1, model.limit + 1)]
    assert {reply.cost_usd for reply in asked} == {0.0}, "nobody is paid: the cost is known, and is nothing"
    replies = [reply.text for reply in asked]
    found = [extract(text, given_forward="", freeze_forward=False).candidate for text in replies]
    assert all(one is not None and one.forward is not None for one in found), "each reply is read as two sections"
    assert "tl.store(dGATE" in replies[0], "the best comes first"
    assert "tl.atomic_add(dGATE" in replies[-1], "the plain one comes last"
    with pytest.raises(NothingDerived) as ended:
        model.ask(ASK, number=model.limit + 1)
    assert ended.value.exit_code is ExitCode.RED
    assert "report" in ended.value.remedy, "swiglu is sound: that none is right would be our defect"


def test_a_forward_that_cannot_be_derived_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    # How often the launch is made depends on the call: no reply may pretend to have taken it back.
    loop = "    if gate.dim():\n        for _ in range(1 + gate.shape[0] // (1 << 40)):\n            swiglu_fwd_kernel["
    text = SWIGLU.read_text().replace("    swiglu_fwd_kernel[", loop)
    path = tmp_path / "looped.py"
    path.write_text(text)
    with pytest.raises(NothingDerived, match="stands in a loop") as refused:
        CompilerModel(path, tmp_path).ask(ASK)
    assert "--backend" in refused.value.remedy


def test_a_forward_at_fault_is_told_when_no_pair_is_left(tmp_path: Path) -> None:
    # All pairs of such a forward are red, and whoever wrote it was asked to report it.
    path = tmp_path / "unmasked.py"
    path.write_text(SWIGLU.read_text().replace("tl.load(UP + offsets, mask=mask, other=0.0)", "tl.load(UP + offsets)"))
    with pytest.raises(
        NothingDerived, match="the forward itself is at fault: out of bounds: swiglu_fwd_kernel"
    ) as ended:
        CompilerModel(path, tmp_path).ask(ASK, number=9)
    assert "Mask the access" in ended.value.remedy
    assert "report" not in ended.value.remedy
