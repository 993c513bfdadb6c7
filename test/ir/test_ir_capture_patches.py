"""What a capture puts in place of attributes of torch and Triton is taken away again, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import LoweringError, execute, standin
from kernel_agent.ir.capture import capture, device
from kernel_agent.ir.capture.patches import CodePatch, Patch, Scene

MISSING = object()


def attributes() -> list[Any]:
    """The identity of everything that is ever replaced, with the state of the thread."""
    found: list[Any] = []
    for patch in (*device._patches(), *capture._patches()):
        owned = isinstance(patch, Patch)
        found.append(vars(patch.owner).get(patch.name, MISSING) if owned else patch.function.__code__)
    return [*found, torch.get_default_dtype(), torch._C._len_torch_function_stack(), torch.is_grad_enabled()]


def check_untouched(before: list[Any]) -> None:
    after = attributes()
    assert len(before) == len(after) > 50
    assert all(one is other or one == other for one, other in zip(before, after, strict=True))


@triton.jit
def _copy(X, Y, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n), mask=c < n)


@triton.jit
def _broken(X, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 100, "too small")


def test_nothing_stays_replaced_after_a_call():
    before = attributes()
    execute(lambda x: _copy[(1,)](x, torch.empty_like(x), x.numel(), 8) and x, (torch.ones(8),), {}, leaves=(0,))
    check_untouched(before)


def test_everything_is_replaced_during_a_call():
    # a name that torch no longer has would be patched in vain
    before = attributes()
    during: list[Any] = []

    def stub(x: Tensor) -> Tensor:
        during.extend(vars(patch.owner).get(patch.name) for patch in device._patches())
        return x

    execute(stub, (torch.ones(8),))
    assert not any(one is other for one, other in zip(before, during, strict=False))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_stays_replaced_when_a_stub_raises(error):
    before = attributes()

    def stub(x: Tensor) -> None:
        with torch.no_grad():
            raise error

    with pytest.raises(error):
        execute(stub, (torch.ones(8),), {}, leaves=(0,))
    check_untouched(before)


def test_nothing_stays_replaced_when_a_kernel_is_refused():
    before = attributes()
    with pytest.raises(LoweringError, match="too small"):
        execute(lambda x: _broken[(1,)](x, 8), (torch.ones(8),))
    check_untouched(before)


def test_a_stand_in_around_a_call_stays_until_its_own_end():
    before = attributes()
    with standin():
        execute(lambda x: x, (torch.ones(8),))
        assert torch.cuda.get_device_capability() == (9, 0)
    check_untouched(before)


class Owner:
    @staticmethod
    def answer() -> str:
        return "original"


def test_a_patch_that_cannot_be_put_in_place_undoes_those_before_it():
    scene: Scene[bool] = Scene(lambda: [Patch(Owner, "other", lambda: 1), Patch(object(), "answer", lambda: 2)])
    with pytest.raises(TypeError), scene.entered(True):
        pass
    assert not hasattr(Owner, "other")


def test_what_someone_else_put_over_a_patch_is_left_alone():
    holder = Owner()
    holder.answer = Owner.answer  # type: ignore[method-assign]
    scene: Scene[bool] = Scene(lambda: [Patch(holder, "answer", lambda: "scene")])
    with scene.entered(True):
        assert holder.answer() == "scene"
        inner = holder.answer
        holder.answer = lambda: inner() + " wrapped"  # type: ignore[method-assign]
        assert holder.answer() == "scene wrapped"
    assert holder.answer() == "original wrapped"


def test_code_is_exchanged_for_functions_that_others_hold():
    def function() -> str:
        return "original"

    def other() -> str:
        return "other"

    held = function
    scene: Scene[bool] = Scene(lambda: [CodePatch(function, other.__code__)])
    with scene.entered(True), scene.entered(True):
        assert held() == "other"
    assert held() == "original"
