"""Cotangents: reproducible, of RMS 1, and laid out as their kind says."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.oracle import CotangentKind, OutputForm, make_cotangents
from kernel_agent.oracle.cotangents import rms, scale_of

MATRIX = OutputForm((6, 10), torch.float32, True)
STATISTIC = OutputForm((6,), torch.float32, False)


def one(kind: CotangentKind, form: OutputForm = MATRIX, seed: int = 0) -> torch.Tensor:
    (made,) = make_cotangents(kind, (form,), seed)
    assert made is not None
    return made


@pytest.mark.parametrize("kind", [k for k in CotangentKind if k not in (CotangentKind.ZERO, CotangentKind.NONE)])
def test_every_kind_has_rms_one_but_for_its_scale(kind):
    # The S term of the rule multiplies by the RMS: a kind with another size would be judged more loosely.
    assert rms(one(kind)) / scale_of(kind, torch.float32) == pytest.approx(1.0, abs=1e-5)


def test_the_same_seed_gives_the_same_values_and_another_seed_others():
    assert torch.equal(one(CotangentKind.RANDOM), one(CotangentKind.RANDOM))
    assert not torch.equal(one(CotangentKind.RANDOM), one(CotangentKind.RANDOM, seed=1))


def test_layouts_are_what_they_are_called():
    assert one(CotangentKind.RANDOM).is_contiguous()
    assert one(CotangentKind.STRIDED).stride() == (20, 2)
    assert one(CotangentKind.TRANSPOSED).stride() == (1, 6)
    assert one(CotangentKind.EXPANDED).stride() == (1, 0)
    assert one(CotangentKind.EXPANDED_ROWS).stride() == (0, 1)


def test_no_stride_of_a_part_of_something_wider_follows_from_the_sizes():
    # Rows whose elements lie side by side are taken for contiguous by who looks at the last stride alone.
    form = OutputForm((2, 3, 4, 16), torch.float16, True)
    part = one(CotangentKind.APART, form)
    assert part.stride() == (4 * 5 * 32, 5 * 32, 32, 1)
    assert bool(part.isfinite().all())
    gaps = part.as_strided((2, 4, 5, 32), part.stride())
    assert int(gaps.isfinite().sum()) == part.numel(), "the gaps hold NaN"


def test_one_hot_has_a_single_element():
    assert int(one(CotangentKind.ONE_HOT).count_nonzero()) == 1


def test_scaled_kinds_stay_finite_in_half_precision():
    # An infinity in the cotangent would make every gradient non-finite and the case say nothing.
    half = OutputForm((64, 64), torch.float16, True)
    assert bool(one(CotangentKind.HUGE, half).isfinite().all())
    assert int(one(CotangentKind.TINY, half).count_nonzero()) > 4000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_kinds_leave_the_range_of_losses_where_a_dtype_can(dtype):
    # A clamp at 1e5 and a threshold of 1e-9 change no gradient of a cotangent near one, and those of real programs.
    wide = OutputForm((64, 64), dtype, True)
    assert float(one(CotangentKind.HUGE, wide).abs().max()) > 2.0**32
    assert 0 < float(one(CotangentKind.TINY, wide).abs().max()) < 2.0**-32


def test_the_gaps_of_a_strided_cotangent_hold_nan():
    # A kernel that reads a gap must not get a harmless number from it.
    strided = one(CotangentKind.STRIDED)
    whole = strided.as_strided((6, 20), (20, 1))
    assert bool(whole[:, 1::2].isnan().all())


def test_outputs_without_gradient_get_none():
    assert make_cotangents(CotangentKind.RANDOM, (MATRIX, STATISTIC, None), 0)[1:] == (None, None)


def test_kind_none_leaves_out_the_last_differentiable_output():
    first, second, third = make_cotangents(CotangentKind.NONE, (MATRIX, MATRIX, STATISTIC), 0)
    assert first is not None
    assert second is None
    assert third is None


def test_kind_last_only_leaves_out_all_but_the_last_differentiable_output():
    first, second, third = make_cotangents(CotangentKind.LAST_ONLY, (MATRIX, MATRIX, STATISTIC), 0)
    assert first is None
    assert second is not None
    assert third is None


def test_scalars_can_have_every_kind():
    scalar = OutputForm((), torch.float32, True)
    for kind in CotangentKind:
        made = next(c for c in make_cotangents(kind, (scalar, scalar), 0) if c is not None)
        assert made.shape == ()
