"""Where a truth comes from: said with it, kept with it, and part of what it is found by."""

from __future__ import annotations

import pytest
import torch
import triton
from forwards import SCALED

from kernel_agent.oracle import CotangentKind, Point, Source, TruthError, Truths, describe, make_cotangents
from kernel_agent.oracle.digest import code_digest
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

POINT = Point(entry=ShapeEntry(dims={"n": 70}))


@pytest.fixture
def truths_of(tmp_path, sandbox):
    """Truths of y = x * w with changes in its text; `folder` keeps them on disk, `closed` forbids any child."""

    def make(*changes, folder=None, closed=False):
        text = SCALED
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "user.py"
        path.write_text(text)
        spec = describe(read_file(path), sandbox)
        if not closed:
            return Truths(spec, sandbox, folder)
        shut = Sandbox()
        shut.close()
        return Truths(spec, shut, folder)

    return make


def gradient_of(truths):
    forward = truths.forward(POINT)
    (truth,) = truths.gradients(forward, [make_cotangents(CotangentKind.RANDOM, forward.forms, 0)])
    return forward, truth


def test_a_truth_says_what_computed_it_when_and_with_what(truths_of):
    forward, truth = gradient_of(truths_of())
    for answer in (forward, truth):
        origin = answer.provenance
        assert origin.source is Source.KERNELS
        assert origin.launches == ("scaled_kernel",)
        assert (origin.versions.torch, origin.versions.triton) == (torch.__version__, triton.__version__)
        assert origin.versions.code == code_digest()
        assert origin.seconds > 0
        assert origin.when.endswith("Z")
    text = str(truth.provenance)
    assert "gradients at n=70 seed=0: the kernels themselves" in text
    assert "1 launch: scaled_kernel" in text
    assert f"triton {triton.__version__}" in text


def test_a_declared_gradient_says_that_the_surrogate_gave_it(truths_of):
    surrogate = "def surrogate(x, w):\n    return x + w\n\n\ndef reference(x, w):"
    forward, truth = gradient_of(truths_of(("def reference(x, w):", surrogate)))
    assert forward.provenance.source is Source.KERNELS, "the outputs stay the kernels' own"
    assert truth.provenance.source is Source.SURROGATE


def test_a_truth_from_disk_still_tells_of_its_first_computation(truths_of, tmp_path):
    folder = tmp_path / "cache"
    _, first = gradient_of(truths_of(folder=folder))
    _, again = gradient_of(truths_of(folder=folder, closed=True))
    assert again.provenance == first.provenance
    assert torch.equal(again.grads["x"], first.grads["x"])


def test_another_kernel_never_meets_the_truth_of_this_one(truths_of, tmp_path):
    folder = tmp_path / "cache"
    _, first = gradient_of(truths_of(folder=folder))
    twice = ("tl.load(X + i, mask=i < n) *", "2 * tl.load(X + i, mask=i < n) *")
    _, other = gradient_of(truths_of(twice, folder=folder))
    torch.testing.assert_close(other.grads["x"], 2 * first.grads["x"])


def test_arguments_that_differ_from_call_to_call_are_the_users_to_mend(truths_of):
    # The forward would be of other values than the gradients, and a right candidate would be called wrong.
    unseeded = ("    g = torch.Generator().manual_seed(seed)\n", "    g = torch.Generator()\n    g.seed()\n")
    truths = truths_of(unseeded)
    with pytest.raises(TruthError, match="make_args gives other values each time") as caught:
        gradient_of(truths)
    assert "seed" in caught.value.remedy
