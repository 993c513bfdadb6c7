"""What counts as replaced by a candidate: in this process, where each change is taken back, and in verdicts."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from kernel_agent.gate import GateOptions, Status, check
from kernel_agent.gate.foreign_attributes import Watched
from kernel_agent.gate.kernels_alone import users_lines
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.userfile import read_file

PAIRS = Path(__file__).parent / "pairs"


def test_a_replaced_function_is_named_until_it_is_put_back(monkeypatch):
    replaced = Watched().replaced
    assert replaced() == ()
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)
        assert replaced() == ("time.perf_counter",)
    assert replaced() == ()


def test_a_method_that_overlays_an_inherited_one_is_named(monkeypatch):
    # Tensors inherit it, so that nothing in the class itself is another object than before.
    replaced = Watched().replaced
    assert "equal" not in vars(torch.Tensor)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "equal", lambda self, other: True, raising=False)
        assert replaced() == ("torch.Tensor.equal",)


def test_a_function_of_the_same_package_under_another_name_is_named(monkeypatch):
    replaced = Watched().replaced
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", torch.is_tensor)
        assert replaced() == ("torch.equal",)


def test_what_torch_wraps_itself_when_it_is_first_used_is_not_named(monkeypatch):
    # torch puts a wrapper into the place of manual_seed when its compiler is imported: no candidate did that.
    import torch._dynamo

    replaced = Watched().replaced
    with monkeypatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch._dynamo.disable(torch.manual_seed))
        assert replaced() == ()


PATCH = "torch.testing.assert_close = lambda *_given, **_options: None\n"
QUICK = GateOptions(seeds=(0,), odd_sizes=0, max_cases=2, values=())


@pytest.fixture
def patching(judge, tmp_path):
    """Truths of a user's file that patches torch when it is imported, and its text."""
    path = Path(shutil.copy(PAIRS / "softmax.py", tmp_path / "patching.py"))
    path.write_text(judge.source("softmax").replace("# --- forward ---\n", f"# --- forward ---\n{PATCH}\n"))
    return Truths(describe(read_file(path), judge.sandbox), judge.sandbox), path.read_text()


def test_what_torch_wraps_for_a_candidate_is_named(monkeypatch):
    # The wrapper's code is torch's, and its name is what it is to replace: all that it runs is the candidate's.
    def softmax(x, dim=None):
        return x

    watched = Watched()
    monkeypatch.setattr(torch, "softmax", torch.no_grad()(softmax))
    assert watched.replaced() == ("torch.softmax",)


def test_what_the_users_own_file_replaces_is_no_candidates_doing(patching, judge):
    truths, text = patching
    verdict = check(truths.spec, text, judge.sandbox, QUICK, truths=truths)
    assert verdict.green, verdict.message


def test_what_a_candidate_replaces_below_the_users_own_patch_is_named(patching, judge):
    # The user's patch above must not open the names to others: another one, and the very same one again.
    truths, text = patching
    for patch in ("torch.allclose = lambda *_given, **_options: True\n", PATCH):
        verdict = check(
            truths.spec,
            text.replace("# --- backward ---\n", f"# --- backward ---\n{patch}\n"),
            judge.sandbox,
            QUICK,
            truths=truths,
        )
        assert verdict.status is Status.TAMPERED, verdict.message
        assert patch.split(" =")[0] in verdict.message


def test_a_patch_in_a_forward_of_the_candidates_own_is_the_candidates(judge):
    source = judge.source("softmax").replace("# --- forward ---\n", f"# --- forward ---\n{PATCH}\n")
    verdict = judge.check_source("softmax", source, QUICK)
    assert verdict.status is Status.TAMPERED, verdict.message


def test_a_default_that_says_of_itself_that_it_is_equal_is_another_one():
    # Comparisons by value would ask the very object that was put in.
    class Equal:
        def __eq__(self, _other):
            return True

        __hash__ = object.__hash__

    replaced, function = Watched().replaced, torch.testing.assert_close
    before = dict(function.__kwdefaults__)
    function.__kwdefaults__["rtol"] = Equal()
    try:
        assert replaced() == ("torch.testing._comparison.assert_close",)
    finally:
        function.__kwdefaults__.update(before)
    assert replaced() == ()


def test_the_users_lines_end_where_a_statement_is_another():
    text = '"""One."""\nimport torch\nMETA = dict(grads=("x",))\n# --- forward ---\nA = {a}\nB = 2\n'
    rest = "# --- backward ---\ndef backward(saved, g):\n    return g\n# --- check ---\n"
    own = text.format(a=1) + rest
    assert users_lines(own, own) == 6, "all above the backward section"
    assert users_lines(own.replace("One", "Two").replace('("x",)', '("y",)'), own) == 6, "text and META are data"
    assert users_lines(text.format(a=3) + rest, own) == 3
    assert users_lines(own.replace("A = 1\n", "A = 1; C = 4\n"), own) == 0, "two statements share a line"
