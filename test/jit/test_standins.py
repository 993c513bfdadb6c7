"""Small calls in the place of large ones: what hangs together in the call hangs together in them."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.jit.errors import CannotTrain
from kernel_agent.jit.sizes import Relation, Shrinking, small_sizes
from kernel_agent.jit.standins import check_section

DIVIDES = Shrinking(Relation.DIVIDES)


def made(shrinking=DIVIDES, **arguments):
    """What the `make_args` of a call returns at its entry, by name."""
    names = ", ".join(arguments)
    scope: dict[str, object] = {"torch": torch}
    exec(f"def stub({names}): ...", scope)
    section = check_section(scope["stub"], arguments, shrinking)
    assert section is not None
    exec(section, scope)
    args, kwargs = scope["make_args"](**scope["SWEEP"][0])
    return dict(zip(arguments, args, strict=True)) | kwargs


def test_equal_sizes_stay_equal_and_numbers_follow_them():
    found = made(x=torch.randn(3000, 4096), w=torch.randn(4096), n=4096)
    assert found["x"].shape[1] == found["w"].shape[0] == found["n"] < 4096


def test_a_multiple_stays_one():
    # 32 heads over 8 groups: a stub that divides them must still find whole groups.
    small = small_sizes([8, 32, 4096], DIVIDES)
    assert small[32] == 4 * small[8]
    assert small[4096] % small[32] == 0


def test_tiles_of_products_keep_the_least_size_that_a_dot_takes():
    assert small_sizes([64, 128, 2048], DIVIDES)[64] == 16


def test_sizes_that_are_odd_stay_odd():
    assert small_sizes([1001], DIVIDES)[1001] % 2 == 1


def test_free_sizes_differ_from_each_other():
    # Equal stand-ins would hide a gradient of the wrong axis.
    assert len(set(small_sizes([512, 1024, 4096], Shrinking(Relation.FREE)).values())) == 3


def test_its_own_sizes_are_only_used_where_they_are_small():
    large = torch.empty(1 << 20)
    assert check_section(lambda x: x, {"x": large}, Shrinking(Relation.OWN)) is None
    assert made(Shrinking(Relation.OWN), x=torch.randn(40, 3))["x"].shape == (40, 3)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, :50],
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(70, 100),
        lambda x: x.view(7, 10, 100).permute(1, 2, 0),
    ],
    ids=["transposed", "apart", "every_second", "expanded", "permuted"],
)
def test_a_tensor_lies_in_memory_as_that_of_the_call(layout):
    tensor = layout(torch.randn(70, 100))
    found = made(x=tensor)["x"]
    assert found.is_contiguous() == tensor.is_contiguous()
    order = sorted(range(tensor.dim()), key=tensor.stride)
    assert sorted(range(found.dim()), key=found.stride) == order
    assert [stride == 0 for stride in found.stride()] == [stride == 0 for stride in tensor.stride()]
    assert (found.stride(order[0]) == 1) == (tensor.stride(order[0]) == 1)


def test_labels_stay_below_the_number_of_classes():
    found = made(logits=torch.randn(4000, 999), labels=torch.randint(0, 999, (4000,)))
    assert found["labels"].dtype is torch.int64
    assert int(found["labels"].max()) < found["logits"].shape[1]


def test_offsets_of_rows_rise_to_their_number():
    found = made(x=torch.randn(3000, 64), starts=torch.tensor([0, 1000, 1700, 3000], dtype=torch.int32))
    starts = found["starts"]
    assert starts.dtype is torch.int32
    assert bool((starts.diff() >= 0).all())
    assert (int(starts[0]), int(starts[-1])) == (0, found["x"].shape[0])


def test_ones_become_numbers_that_tell_a_missing_factor():
    # A weight of ones would let a gradient pass that forgets the weight.
    w = made(w=torch.ones(64))["w"]
    assert bool((w > 0).all())
    assert float(w.std()) > 0.05


def test_values_of_one_sign_keep_it():
    assert bool((made(decay=-torch.rand(64) - 0.1)["decay"] < 0).all())


def test_narrow_floats_stay_narrow():
    assert made(x=torch.randn(64, dtype=torch.bfloat16))["x"].dtype is torch.bfloat16


def test_an_argument_that_cannot_be_written_down_is_refused():
    with pytest.raises(CannotTrain, match="the argument `g` is a Generator"):
        made(x=torch.randn(4), g=torch.Generator())
