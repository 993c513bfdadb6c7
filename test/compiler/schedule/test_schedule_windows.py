"""Gradients of what windows share are gathered by the programs that own the elements, and stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from schedule_plans import agree, atomics, from_source, named_source, plans_of
from window_forwards import (
    activated_convolution,
    blurred,
    by_channel,
    causal,
    convolution,
    differences,
    dilated,
    flat_convolution,
    grouped,
    half_unrolled,
    in_chunks,
    normed_neighbours,
    patches,
    reflected,
    replicated,
    shuffled,
    square_convolution,
    squares_1d,
    squares_2d,
    totals_of_windows,
    unrolled_convolution,
    weighted,
)

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.relane import relaned
from kernel_agent.compiler.schedule.windows import windowed
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.order import forwards

F32 = dict.fromkeys(("X", "Y", "Parts", "Weight", "Taps", "Scale"), "*fp32")
SIZES = dict.fromkeys(("T", "T_OUT", "H", "W", "HO", "WO", "CI", "CO", "PAD", "pixels"), "i32")
GROUPED = {"SIDE": 3, "PAD": 1, "K": 5, "CHANNELS": 8, "N": 6, "BM": 16, "BN": 16}


def kernel_of(function, source=from_source, **constants):
    names = [name for name in function.arg_names if name not in constants]
    return source(function, {name: (F32 | SIZES)[name] for name in names}, **constants)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("taps", "stride", "pad"), [(3, 1, 1), (3, 2, 1), (4, 2, 0), (2, 3, 0), (5, 3, 2)])
def test_strided_and_padded_windows_are_gathered(taps: int, stride: int, pad: int) -> None:
    # A tap too far, an output too many or a remainder forgotten gives other gradients than the atomics do.
    made = plans_of(kernel_of(squares_1d, K=taps, STRIDE=stride, PAD=pad, BLOCK=4), "X", "Y", 2)
    assert not atomics(made["owned"])
    for size in (5, 8, 13):
        outputs = (size + 2 * pad - taps) // stride + 1
        given = {"X": drawn(3, size), "T": size, "T_OUT": outputs}
        agree(made, given, {"Y": drawn(3, outputs)}, (3, triton.cdiv(outputs, 4)), BLOCK=4)


def test_nothing_is_read_for_programs_that_the_forward_had_not() -> None:
    # Eight outputs have two programs with a number each, the ten elements of their windows three: the third read the
    # next row's cotangents, and behind the last row what was not there. Its outputs' mask left that out too late.
    made = plans_of(kernel_of(totals_of_windows, K=3, BLOCK=4), "X", "Parts", 2)
    assert not atomics(made["owned"])
    for outputs in (8, 7, 4):
        given = {"X": drawn(3, outputs + 2), "T": outputs + 2, "T_OUT": outputs}
        programs = triton.cdiv(outputs, 4)
        agree(made, given, {"Parts": drawn(3, programs)}, (3, programs), BLOCK=4)


@pytest.mark.parametrize(("side", "stride"), [(3, 1), (3, 2), (2, 2)])
def test_windows_of_an_image_whose_pixels_are_counted_by_one_number_are_gathered(side: int, stride: int) -> None:
    # Rows and columns are digits of the output's number: a shift that carries over a row's end would be wrong.
    made = plans_of(kernel_of(squares_2d, K=side, STRIDE=stride, BLOCK=8), "X", "Y", 2)
    assert not atomics(made["owned"])
    for height, width in ((5, 4), (4, 7)):
        high, wide = (height - side) // stride + 1, (width - side) // stride + 1
        given = {"X": drawn(2, height, width), "H": height, "W": width, "HO": high, "WO": wide}
        agree(made, given, {"Y": drawn(2, high, wide)}, (2, triton.cdiv(high * wide, 8)), BLOCK=8)


@pytest.mark.parametrize("rows", [4, 1])
def test_what_a_program_sums_as_a_whole_is_read_for_each_of_the_outputs(rows: int) -> None:
    # Beside a tile's border the neighbour's cotangent counts: the owner's own would give other gradients.
    made = plans_of(kernel_of(differences, BLOCK_H=rows, BLOCK_W=8), "X", "Parts", 2)
    assert not atomics(made["owned"])
    for height, width, idle in ((9, 13, 0), (4, 8, 0), (5, 9, 1)):
        grid = (2 * triton.cdiv(height, rows), triton.cdiv(width, 8) + idle)
        given = {"X": drawn(2, height, width), "H": height, "W": width}
        agree(made, given, {"Parts": drawn(*grid)}, grid, BLOCK_H=rows, BLOCK_W=8)


def test_a_convolution_sums_taps_and_channels_in_the_kernel_that_owns_elements() -> None:
    # Taps are trips of a loop, and other programs have the other output channels: both become loops.
    made = plans_of(kernel_of(convolution, TAPS=3, STRIDE=2, BM=16, BN=16, BK=16), "X Weight", "Y", 2)
    assert not atomics(made["split"])
    names = [step.kernel.name for step in made["split"].steps]
    assert not [name for name in names if name.endswith(("_X_X", "_dX_dX"))], names
    given = {"X": drawn(21, 5), "Weight": drawn(3, 5, 18), "T": 21, "T_OUT": 11, "CI": 5, "CO": 18}
    agree(made, given, {"Y": drawn(11, 18)}, (1, 2), BM=16, BN=16, BK=16)


def test_windows_are_gathered_from_the_derivative_that_another_launch_keeps() -> None:
    # Of a square of sums it takes the sums again, which no owner of elements of the input has: it is loaded there.
    made = plans_of(kernel_of(activated_convolution, TAPS=3, BM=16, BN=16, BK=16), "X Weight", "Y", 2)
    assert not atomics(made["split"])
    (own,) = [step.kernel for step in made["split"].steps if step.kernel.name.endswith("_dX")]
    assert "saved" in " ".join(value.name for value in own.arguments)
    given = {"X": drawn(21, 5), "Weight": drawn(3, 5, 18), "T": 21, "CI": 5, "CO": 18}
    agree(made, given, {"Y": drawn(21, 18)}, (2, 2), BM=16, BN=16, BK=16)


@pytest.mark.parametrize("forward", [unrolled_convolution, flat_convolution])
def test_taps_of_a_convolution_are_summed_before_they_are_stored(forward: Any) -> None:
    # Taps in a row were each added to memory, with a barrier between; taps and channels that one loop counts left each
    # tap to a program of its own, and its sums atomic.
    made = plans_of(kernel_of(forward, TAPS=3, BM=16, BN=16, BK=16), "X Weight", "Y", 2)
    steps = [step.kernel for step in made["split"].steps]
    (own,) = [kernel for kernel in steps if any(value.name == "dX" for value in kernel.arguments)]
    codes = [op.code for op in own.ops if "base" in op.attributes and op.base.name == "dX"]
    assert codes == [Code.STORE]
    given = {"X": drawn(21, 20), "Weight": drawn(3, 20, 18), "T": 21, "CI": 20, "CO": 18}
    agree(made, given, {"Y": drawn(21, 18)}, (2, 2), BM=16, BN=16, BK=16)


@pytest.mark.parametrize("side", [3, 5])
def test_taps_in_a_loop_that_start_half_a_window_before_are_gathered(side: int) -> None:
    # `-SIDE // 2` in the place of `-(SIDE // 2)` stores beside the elements: the evaluator asks what symbols are.
    made = plans_of(kernel_of(blurred, named_source, SIDE=side, BLOCK=4), "X", "Y", 2)
    assert not atomics(made["owned"])
    given = {"X": drawn(2, 9), "Taps": drawn(side), "T": 9}
    agree(made, given, {"Y": drawn(2, 9)}, (2, 3), SIDE=side, BLOCK=4)


@pytest.mark.parametrize(("taps", "stride", "pad", "apart"), [(3, 1, 1, 1), (3, 2, 1, 1), (3, 3, 2, 2)])
def test_windows_with_taps_in_two_loops_are_gathered_along_both_axes(
    taps: int, stride: int, pad: int, apart: int
) -> None:
    # Rows and columns each have an inverse of their own: one taken for the other is seen where the image is no square.
    names = {"K": taps, "STRIDE": stride, "PAD": pad, "APART": apart, "BLOCK_H": 2, "BLOCK_W": 4}
    made = plans_of(kernel_of(dilated, **names), "X", "Y", 3)
    assert not atomics(made["owned"])
    height, width = 6, 7
    high, wide = ((size + 2 * pad - apart * (taps - 1) - 1) // stride + 1 for size in (height, width))
    given = {"X": drawn(2, height, width), "Weight": drawn(taps, taps), "H": height, "W": width, "HO": high, "WO": wide}
    agree(made, given, {"Y": drawn(2, high, wide)}, (2, triton.cdiv(high, 2), triton.cdiv(wide, 4)), **names)


def test_windows_whose_outputs_know_of_each_other_stay_atomic() -> None:
    # The sum of a tile is another one for other lanes: moved, it would be the sum of the wrong outputs.
    made = plans_of(kernel_of(normed_neighbours, BLOCK=4), "X", "Y", 1)
    assert atomics(next(iter(made.values())))
    agree(made, {"X": drawn(11), "T": 11}, {"Y": drawn(11)}, (3,), BLOCK=4)


def test_windows_of_the_steps_of_a_chunk_are_not_gathered_by_programs_that_count_chunks() -> None:
    # The loop over a chunk's steps begins where the program's number says: gone through by programs that own single
    # steps, it began somewhere else, and the gradients were those of other steps.
    made = plans_of(kernel_of(in_chunks, CHUNK=4, BLOCK=4), "X", "Y", 1)
    for steps in (8, 11):
        given = {"X": drawn(steps, 3), "T": steps, "W": 3}
        agree(made, given, {"Y": drawn(steps, 3)}, (triton.cdiv(steps, 4),), CHUNK=4, BLOCK=4)


def test_digits_of_a_number_in_another_order_are_stored() -> None:
    # n // (a b), n // b % a and n % b tell n, whatever places an address gives them.
    made = plans_of(kernel_of(shuffled, R=2, BLOCK_W=4, BLOCK_R=2), "X", "Y", 1)
    assert not atomics(made["owned"])
    given = {"X": drawn(2, 4, 3, 4), "H": 3, "W": 4}
    agree(made, given, {"Y": drawn(2, 6, 8)}, (12,), BLOCK_W=4, BLOCK_R=2)


@pytest.mark.parametrize("source", [from_source, named_source])
def test_rows_and_columns_of_a_window_that_one_loop_counts_are_gathered(source: Any) -> None:
    # tap // 3 and tap % 3 each move a digit of the pixel's number, while the weights are read by the tap itself: with
    # one loop, each tap had a program of its own and added its sums atomically.
    made = plans_of(kernel_of(square_convolution, source, SIDE=3, BM=16, BN=16, BK=16), "X Weight", "Y", 2)
    steps = [step.kernel for step in made["split"].steps]
    (own,) = [kernel for kernel in steps if any(value.name == "dX" for value in kernel.arguments)]
    assert [op.code for op in own.ops if "base" in op.attributes and op.base.name == "dX"] == [Code.STORE]
    given = {"X": drawn(2, 4, 5, 20), "Weight": drawn(9, 20, 18)}
    sizes = {"pixels": 40, "H": 4, "W": 5, "CI": 20, "CO": 18}
    agree(made, given | sizes, {"Y": drawn(2, 4, 5, 18)}, (3, 2), SIDE=3, BM=16, BN=16, BK=16)


def test_gathered_gradients_and_sums_of_as_many_outputs_are_one_launch() -> None:
    # What both launches read was read twice: the image and its cotangent, three quarters of what is moved.
    made = plans_of(kernel_of(weighted, TAPS=3, BLOCK=4), "X Taps", "Y", 2)
    (step,) = made["owned"].steps
    assert {"X", "dX", "dTaps_rows"} <= {value.name for value in step.kernel.arguments}
    assert any("grid1" in fact.expression for fact in made["owned"].facts)  # are they enough for the elements?
    for size in (11, 12, 13):
        grid = (2, triton.cdiv(size, 4))
        agree(made, {"X": drawn(2, size), "Taps": drawn(2, 3), "T": size}, {"Y": drawn(2, size)}, grid, BLOCK=4)


def test_each_turn_of_few_programs_gathers_the_elements_of_its_outputs() -> None:
    # A launch of its own for the gathered gradient read the cotangent once more.
    made = plans_of(kernel_of(weighted, TAPS=3, BLOCK=4), "X Taps", "Y", 2)
    (step,) = made["rows"].steps
    (loop,) = [op for op in step.kernel.body.ops if op.code is Code.FOR]
    inside = [op.base.name for op in loop.blocks[0].ops if op.code is Code.STORE]
    assert inside == ["dX"]  # the sums of the taps are stored behind the last turn
    for size in (11, 12, 13, 40):
        grid = (2, triton.cdiv(size, 4))
        agree(made, {"X": drawn(2, size), "Taps": drawn(2, 3), "T": size}, {"Y": drawn(2, size)}, grid, BLOCK=4)


def test_launches_of_more_elements_than_outputs_stay_apart() -> None:
    # The programs of the outputs would leave out the last elements of every row.
    made = plans_of(kernel_of(squares_1d, K=3, STRIDE=2, PAD=1, BLOCK=4), "X", "Y", 2)
    assert "grid1" not in made["owned"].steps[0].grid


@pytest.mark.parametrize(("forward", "numbers"), [(causal, {"TAPS": 3}), (blurred, {"SIDE": 3})])
def test_elements_that_one_tap_of_a_loop_reaches_all_of_need_no_zeros(forward: Any, numbers: dict[str, int]) -> None:
    # The gradient was filled with zeros first, since any trip might have been the only one to store to an element.
    made = plans_of(kernel_of(forward, named_source, BLOCK=4, **numbers), "X", "Y", 2)
    (buffer,) = made["owned"].buffers
    scope = {"triton": triton, "T": 9, "grid0": 2, "grid1": 3, "BLOCK": 4, **numbers}
    assert eval(buffer.empty_if, {**scope, "X": torch.empty(2, 9)})
    assert not eval(buffer.empty_if, {**scope, "X": torch.empty(2, 10)})
    given = {"X": drawn(2, 9), "Taps": drawn(3), "T": 9}
    agree(made, given, {"Y": drawn(2, 9)}, (2, 3), BLOCK=4, **numbers)


def test_elements_that_no_tap_reaches_all_of_start_as_zeros() -> None:
    # Every second output alone: elements between have no output of any single tap, and those behind the last have none.
    made = plans_of(kernel_of(dilated, K=2, STRIDE=2, PAD=0, APART=2, BLOCK_H=2, BLOCK_W=4), "X", "Y", 3)
    (buffer,) = [one for one in made["owned"].buffers if one.name == "dX"]
    assert not buffer.empty_if


def test_what_all_taps_of_a_trip_ask_for_is_asked_for_behind_the_loop() -> None:
    # Some taps are written out, others a loop: the mask of their sum knew no limit of rows and columns any more, and
    # without those an element may be another program's.
    numbers = {"SIDE": 3, "BLOCK_H": 2, "BLOCK_W": 4}
    made = plans_of(kernel_of(half_unrolled, named_source, **numbers), "X", "Y", 3)
    assert not atomics(made["owned"])
    (buffer,) = made["owned"].buffers
    scope = {"triton": triton, "H": 5, "W": 6, "grid0": 2, "grid1": 3, "grid2": 2, **numbers}
    assert eval(buffer.empty_if, {**scope, "X": torch.empty(2, 5, 6)})
    given = {"X": drawn(2, 5, 6), "Weight": drawn(2, 3, 3), "H": 5, "W": 6}
    agree(made, given, {"Y": drawn(2, 5, 6)}, (2, 3, 2), **numbers)


def test_a_reflected_border_is_gathered_with_its_image() -> None:
    # Elements near an edge have up to nine outputs, four of them around a corner: a mirrored tap that counts upwards, a
    # corner forgotten or an edge pixel taken twice gives other gradients than the atomics do.
    made = plans_of(kernel_of(reflected, named_source, BLOCK=8), "X", "Y", 2)
    assert not atomics(made["owned"])
    assert {"H >= PAD + 1", "W >= PAD + 1"} <= {fact.expression for fact in made["owned"].facts}  # folded once
    for height, width, pad in ((5, 4, 1), (4, 7, 3), (9, 5, 2), (3, 4, 0)):
        high, wide = height + 2 * pad, width + 2 * pad
        given = {"X": drawn(2, height, width), "H": height, "W": width, "PAD": pad}
        agree(made, given, {"Y": drawn(2, high, wide)}, (2, triton.cdiv(high * wide, 8)), BLOCK=8)


def test_a_reflection_in_which_no_fold_can_have_two_sides_at_once_asks_for_nine_elements() -> None:
    # abs and where are two folds of each axis: sixteen sides, seven of which only a border wider than its image has.
    made = plans_of(kernel_of(reflected, named_source, BLOCK=8), "X", "Y", 2)
    (step,) = made["owned"].steps
    assert sum(op.code is Code.LOAD and op.base.name == "dY" for op in step.kernel.ops) == 9


def test_a_border_that_repeats_its_edge_stays_atomic() -> None:
    # The edge has as many outputs as the border is wide: one tap for them would add one of these alone.
    made = plans_of(kernel_of(replicated, named_source, BLOCK=8), "X", "Y", 2)
    assert all(atomics(plan) for plan in made.values())
    agree(made, {"X": drawn(2, 5), "T": 5, "PAD": 3}, {"Y": drawn(2, 11)}, (2, 2), BLOCK=8)


@pytest.mark.parametrize(("pad", "scaled"), [(1, 0), (0, 0), (0, 1)])
def test_patches_whose_rows_and_columns_programs_and_lanes_count_are_gathered(pad: int, scaled: int) -> None:
    # Without padding elements have more patches than outputs: programs of the forward's grid left the last ones out,
    # and what a program knows by its own number is that of another patch.
    names = {"SIDE": 3, "PAD": pad, "SCALED": scaled, "HIGH": 2, "WIDE": 8, "BN": 16, "BK": 16}
    made = plans_of(kernel_of(patches, named_source, **names), "X Weight", "Y", 2)
    (step,) = [one for one in made["split"].steps if any(value.name == "dX" for value in one.kernel.arguments)]
    codes = [op.code for op in step.kernel.ops if "base" in op.attributes and op.base.name == "dX"]
    assert codes == [Code.STORE]
    for images, height, width in ((2, 5, 9), (1, 4, 11)):
        high, wide = height + 2 * pad - 2, width + 2 * pad - 2
        grid = (images * triton.cdiv(high, 2) * triton.cdiv(wide, 8), 2)
        given = {"X": drawn(images, 5, height, width), "Weight": drawn(9, 18, 5), "Scale": drawn(grid[0])}
        sizes = {"H": height, "W": width, "HO": high, "WO": wide, "CI": 5, "CO": 18}
        agree(made, given | sizes, {"Y": drawn(images, 18, high, wide)}, grid, **names)


def test_lanes_that_count_taps_and_channels_are_gathered_tap_by_tap() -> None:
    # Lanes of one product move the pixel by four different shifts, and behind the ninth tap there is no tenth: one tap
    # for all lanes, or lanes of the tap that is not there, give other gradients than the atomics do.
    made = plans_of(kernel_of(grouped, named_source, BJ=32, ENDS=1, **GROUPED), "X Weight", "Y", 2)
    (step,) = [one for one in made["split"].steps if any(value.name == "dX" for value in one.kernel.arguments)]
    codes = [op.code for op in step.kernel.ops if "base" in op.attributes and op.base.name == "dX"]
    assert codes == [Code.STORE]
    for images, height, width, groups in ((2, 5, 9, 2), (1, 4, 4, 3)):
        pixels = images * height * width
        given = {"X": drawn(images, height, width, groups * 5), "Weight": drawn(groups, 9, 5, 6)}
        sizes = {"pixels": pixels, "H": height, "W": width, "HO": height, "WO": width, "CI": groups * 5}
        grid = (triton.cdiv(pixels, 16), groups)
        agree(made, given | sizes, {"Y": drawn(pixels, groups * 6)}, grid, BJ=32, ENDS=1, **GROUPED)


@pytest.mark.parametrize(("side", "ends", "done"), [(3, 1, True), (3, 0, False), (4, 0, True)])
def test_lanes_behind_the_last_tap_must_add_nothing_where_there_are_some(side: int, ends: int, done: bool) -> None:
    # Seventy-two places in blocks of thirty-two leave twenty-four lanes: a trip for each tap would lose what these add.
    kernel = kernel_of(grouped, BJ=32, ENDS=ends, **{**GROUPED, "SIDE": side})
    adjoint = differentiate(kernel, read=frozenset(("X", "Weight")), written=frozenset(("Y",)))
    assert (relaned(forwards(adjoint.kernel), Launch.like_forward(2)) is not None) == done


def test_weights_that_whole_programs_add_to_are_not_gathered_on_a_grid_of_their_own() -> None:
    # A weight for every tap and channel would have programs of its own, each of which reads all images for all taps.
    kernel = kernel_of(by_channel, TAPS=3, BLOCK=4)
    adjoint = differentiate(kernel, read=frozenset(("X", "Weight")), written=frozenset(("Y",)))
    with pytest.raises(CannotDerive, match="others than those of the outputs"):
        windowed(forwards(adjoint.kernel), "dWeight", Launch.like_forward(2))
