"""What counts as replaced by a candidate: in this process, where each change is taken back, and in verdicts."""

from __future__ import annotations

import shutil
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from kernel_agent.gate import GateOptions, Status, check, inventory, known_modules
from kernel_agent.gate.foreign_attributes import Watched
from kernel_agent.gate.kernels_alone import users_lines
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Job

PAIRS = Path(__file__).parent / "pairs"


@pytest.fixture(params=["all modules", "since the server's look", "in Python alone"])
def watched(request, monkeypatch):
    """`Watched`, in each way in which a process finds out what has changed."""
    monkeypatch.setattr(known_modules._Server, "first", None)
    if request.param == "since the server's look":
        known_modules.take_first()
    elif request.param == "in Python alone":
        monkeypatch.setattr(inventory, "PARTS", None)
    return Watched


def test_a_replaced_function_is_named_until_it_is_put_back(monkeypatch, watched):
    replaced = watched().replaced
    assert replaced() == ()
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)
        assert replaced() == ("time.perf_counter",)
    assert replaced() == ()


def test_a_method_that_overlays_an_inherited_one_is_named(monkeypatch, watched):
    # Tensors inherit it, so that nothing in the class itself is another object than before.
    replaced = watched().replaced
    assert "equal" not in vars(torch.Tensor)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "equal", lambda self, other: True, raising=False)
        assert replaced() == ("torch.Tensor.equal",)


def test_a_function_of_the_same_package_under_another_name_is_named(monkeypatch, watched):
    replaced = watched().replaced
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", torch.is_tensor)
        assert replaced() == ("torch.equal",)


def test_what_torch_wraps_itself_when_it_is_first_used_is_not_named(monkeypatch, watched):
    # torch puts a wrapper into the place of manual_seed when its compiler is imported: no candidate did that.
    import torch._dynamo

    replaced = watched().replaced
    with monkeypatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch._dynamo.disable(torch.manual_seed))
        assert replaced() == ()


def other(*_given, **_options):
    """What is put into functions here: it has no defaults."""


@pytest.mark.parametrize("part", ["__code__", "__defaults__", "__kwdefaults__"])
def test_each_part_of_a_function_that_can_be_exchanged_is_looked_at(monkeypatch, watched, part):
    # The function stays the same object under the same name in all of them.
    replaced, function = watched().replaced, torch.testing.make_tensor
    code = {"__code__": other.__code__, "__defaults__": (0,), "__kwdefaults__": {**function.__kwdefaults__}}
    monkeypatch.setattr(function, part, code[part])
    assert replaced() == ("torch.testing._creation.make_tensor",)


def test_a_setting_of_a_class_is_named(monkeypatch, watched):
    reset = watched().reset
    monkeypatch.setattr(torch.nn.LayerNorm, "__constants__", "eps", raising=True)
    assert reset() == (), "a list before"
    monkeypatch.setattr(torch.nn.Module, "call_super_init", True)
    assert reset() == ("torch.nn.modules.module.Module.call_super_init",)


def test_what_changed_between_the_servers_look_and_the_candidate_is_nobodys(monkeypatch):
    # A user's own statements come between: compared with the server's look, what they patch would be the candidate's.
    monkeypatch.setattr(known_modules._Server, "first", None)
    known_modules.take_first()
    kwargs = dict(torch.testing.assert_close.__kwdefaults__)
    late = types.ModuleType("late_module")
    late.function = other
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "late_module", late)
        patch.setattr(torch, "allclose", other)
        patch.setattr(torch.nn.Module, "call_super_init", True)
        patch.setattr(torch.testing.make_tensor, "__code__", other.__code__)
        patch.setitem(torch.testing.assert_close.__kwdefaults__, "rtol", 1.0)
        watched = Watched()
        assert (watched.replaced(), watched.reset()) == ((), ())
        late.function = None
        assert watched.replaced() == ("late_module.function",)
        late.function = other
    assert watched.reset() == ("torch.nn.modules.module.Module.call_super_init",)
    assert torch.testing.assert_close.__kwdefaults__ == kwargs
    assert watched.replaced() == (
        "late_module.__name__",
        "torch.allclose",
        "torch.testing._comparison.assert_close",
        "torch.testing._creation.make_tensor",
    )


def test_a_child_looks_at_all_modules_without_copying_what_they_hold(judge):
    # Each page that is written is copied: 23,000 of them where each object was looked at in Python.
    assert _told(judge.sandbox, "looked")["pages"] < 6_000


def test_children_of_one_server_do_not_draw_the_same_numbers_with_numpy(judge):
    # Arguments that nobody seeds are an error since they differ from child to child; equal ones would pass unseen.
    assert _told(judge.sandbox, "drawn") != _told(judge.sandbox, "drawn")


def _told(sandbox, entry):
    report = sandbox.run(Job(f"module_entries:{entry}", readable=(Path(__file__).resolve().parent,)))
    assert report.finished, report.stderr_tail
    return report.messages[0].record


PATCH = "torch.testing.assert_close = lambda *_given, **_options: None\n"
QUICK = GateOptions(seeds=(0,), odd_sizes=0, max_cases=2, values=())


@pytest.fixture
def patching(judge, tmp_path):
    """Truths of a user's file that patches torch when it is imported, and its text."""
    path = Path(shutil.copy(PAIRS / "softmax.py", tmp_path / "patching.py"))
    path.write_text(judge.source("softmax").replace("# --- forward ---\n", f"# --- forward ---\n{PATCH}\n"))
    return Truths(describe(read_file(path), judge.sandbox), judge.sandbox), path.read_text()


def test_what_torch_wraps_for_a_candidate_is_named(monkeypatch, watched):
    # The wrapper's code is torch's, and its name is what it is to replace: all that it runs is the candidate's.
    def softmax(x, dim=None):
        return x

    replaced = watched().replaced
    monkeypatch.setattr(torch, "softmax", torch.no_grad()(softmax))
    assert replaced() == ("torch.softmax",)


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


def test_a_default_that_says_of_itself_that_it_is_equal_is_another_one(watched):
    # Comparisons by value would ask the very object that was put in.
    class Equal:
        def __eq__(self, _other):
            return True

        __hash__ = object.__hash__

    replaced, function = watched().replaced, torch.testing.assert_close
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
