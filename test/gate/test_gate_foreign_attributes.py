"""What counts as replaced by a candidate, in this process: each change is taken back."""

from __future__ import annotations

import time

import torch

from kernel_agent.gate.foreign_attributes import watch_attributes


def test_a_replaced_function_is_named_until_it_is_put_back(monkeypatch):
    replaced = watch_attributes()
    assert replaced() == ()
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)
        assert replaced() == ("time.perf_counter",)
    assert replaced() == ()


def test_a_method_that_overlays_an_inherited_one_is_named(monkeypatch):
    # Tensors inherit it, so that nothing in the class itself is another object than before.
    replaced = watch_attributes()
    assert "equal" not in vars(torch.Tensor)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "equal", lambda self, other: True, raising=False)
        assert replaced() == ("torch.Tensor.equal",)


def test_a_function_of_the_same_package_under_another_name_is_named(monkeypatch):
    replaced = watch_attributes()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", torch.is_tensor)
        assert replaced() == ("torch.equal",)


def test_what_torch_wraps_itself_when_it_is_first_used_is_not_named(monkeypatch):
    # torch puts a wrapper into the place of manual_seed when its compiler is imported: no candidate did that.
    import torch._dynamo

    replaced = watch_attributes()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "manual_seed", torch._dynamo.disable(torch.manual_seed))
        assert replaced() == ()
