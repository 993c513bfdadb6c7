"""The forwards of `saved_kernels` and `online_kernels`, on random inputs whose extents are no multiples of tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import online_kernels as online
import saved_kernels as kernels
import torch
from saved_checks import Forward, empty, kernel_from, ran, seeded

F32 = "*fp32"
ROWS, N = 3, 37


def softmax_row(*, element: str = "fp32") -> Forward:
    """A row in one block, with masked lanes."""
    types = {"x_ptr": f"*{element}", "y_ptr": f"*{element}", "stride": "i32", "n": "i32"}
    kernel = kernel_from(kernels.softmax_row, types, BLOCK=16)
    given = {"x_ptr": 3 * seeded(ROWS, 16), "y_ptr": empty(ROWS, 16), "stride": 16, "n": 13}
    given["y_ptr"][:, 13:] = 0.0
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


def softmax_rows() -> Forward:
    """Two programs that take all rows in turn."""
    types = {"x_ptr": F32, "y_ptr": F32, "rows": "i32", "stride": "i32", "n": "i32"}
    given = {"x_ptr": 3 * seeded(5, 16), "y_ptr": empty(5, 16), "rows": 5, "stride": 16, "n": 16}
    return ran(kernel_from(kernels.softmax_rows, types, BLOCK=16), (2,), given, ["x_ptr"], ["y_ptr"])


def row_of(kind: str, *, padding: float = -math.inf) -> Forward:
    """What becomes of a row that is cut within a block."""
    types = {"x_ptr": F32, "y_ptr": F32, "stride": "i32", "n": "i32"}
    given = {"x_ptr": 3 * seeded(ROWS, 16), "y_ptr": torch.zeros(ROWS, 16, dtype=torch.float64), "stride": 16, "n": 13}
    kernel = kernel_from(kernels.row_of, types, BLOCK=16, PADDING=padding, KIND=kind)
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


def softmax_in_three_passes() -> Forward:
    """The largest, the sum, the quotients."""
    types = {"x_ptr": F32, "y_ptr": F32, "stride": "i32", "n": "i32"}
    given = {"x_ptr": 3 * seeded(ROWS, N), "y_ptr": empty(ROWS, N), "stride": N, "n": N}
    return ran(kernel_from(kernels.softmax_in_three_passes, types, BLOCK=16), (ROWS,), given, ["x_ptr"], ["y_ptr"])


def log_sums_of_rows(kind: str = "") -> Forward:
    """Two tiles of four rows, of which five are there: their log-sum-exps, and what these come to."""
    types = {
        **dict.fromkeys(("x_ptr", "w_ptr", "lse_ptr", "y_ptr"), F32),
        "rows": "i32",
        "n": "i32",
    }
    given = {
        "x_ptr": 3 * seeded(5, 13), "w_ptr": seeded(13, seed=1), "lse_ptr": torch.zeros(5, dtype=torch.float64),
        "y_ptr": empty(2), "rows": 5, "n": 13,
    }  # fmt: skip
    kernel = kernel_from(kernels.log_sums_of_rows, types, M=4, BLOCK=16, KIND=kind)
    return ran(kernel, (2,), given, ["x_ptr", "w_ptr"], ["y_ptr"])


def layer_norm(*, looped: bool = False) -> Forward:
    """With its mean and rstd stored."""
    types = dict.fromkeys(("x_ptr", "w_ptr", "b_ptr", "y_ptr", "mean_ptr", "rstd_ptr"), F32)
    types |= {"stride": "i32", "n": "i32", "eps": "fp32"}
    n = N if looped else 16
    given = {
        "x_ptr": 2 + seeded(ROWS, n), "w_ptr": seeded(n, seed=1), "b_ptr": seeded(n, seed=2), "y_ptr": empty(ROWS, n),
        "mean_ptr": empty(ROWS), "rstd_ptr": empty(ROWS), "stride": n, "n": n, "eps": 1e-3,
    }  # fmt: skip
    kernel = kernel_from(kernels.layer_norm_looped if looped else kernels.layer_norm, types, BLOCK=16)
    return ran(kernel, (ROWS,), given, ["x_ptr", "w_ptr", "b_ptr"], ["y_ptr"])


def cross_entropy(*, store_lse: bool, differentiated: Sequence[str] = ("loss_ptr",)) -> Forward:
    """Of logits that no block holds at once."""
    types = {"x_ptr": F32, "label_ptr": "*i32", "loss_ptr": F32, "lse_ptr": F32, "stride": "i32", "n": "i32"}
    labels = torch.tensor([1, 5, 30], dtype=torch.int32)
    given = {
        "x_ptr": 3 * seeded(ROWS, N), "label_ptr": labels, "loss_ptr": empty(ROWS), "lse_ptr": empty(ROWS),
        "stride": N, "n": N,
    }  # fmt: skip
    kernel = kernel_from(online.cross_entropy, types, BLOCK=16, STORE_LSE=store_lse)
    return ran(kernel, (ROWS,), given, ["x_ptr"], differentiated)


def softmax_by_lanes(kind: str = "softmax", *, n: int = N) -> Forward:
    """A running maximum and sum for each lane; some kinds divide by another sum than that of what they divide."""
    types = {"x_ptr": F32, "y_ptr": F32, "stride": "i32", "n": "i32", "scale": "fp32"}
    given = {"x_ptr": 3 * seeded(ROWS, n), "y_ptr": empty(ROWS, n), "stride": n, "n": n, "scale": 0.5}
    kernel = kernel_from(online.softmax_by_lanes, types, BLOCK=16, KIND=kind)
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


def softmin_by_lanes(kind: str = "") -> Forward:
    """A running minimum and sum for each lane, at a temperature from memory."""
    types = {"x_ptr": F32, "t_ptr": F32, "y_ptr": F32, "stride": "i32", "n": "i32"}
    temperature = torch.tensor([0.75], dtype=torch.float64)
    given = {"x_ptr": 3 * seeded(ROWS, N), "t_ptr": temperature, "y_ptr": empty(ROWS), "stride": N, "n": N}
    return ran(
        kernel_from(online.softmin_by_lanes, types, BLOCK=16, KIND=kind),
        (ROWS,),
        given,
        ["x_ptr", "t_ptr"],
        ["y_ptr"],
    )


def moments_by_lanes(kind: str = "", *, n: int = N) -> Forward:
    """The variance of rows by a running mean for each lane; of some kinds, something else."""
    types = {"x_ptr": F32, "y_ptr": F32, "stride": "i32", "n": "i32"}
    given = {"x_ptr": 2 + seeded(ROWS, n), "y_ptr": empty(ROWS), "stride": n, "n": n}
    return ran(kernel_from(kernels.moments_by_lanes, types, BLOCK=16, KIND=kind), (ROWS,), given, ["x_ptr"], ["y_ptr"])


def moments_of_rows(*, gap: bool = True, n: int = N) -> Forward:
    """Variances and means of rows by running means of lanes, which are merged; a `gap` between them counts or not."""
    types = {"x_ptr": F32, "y_ptr": F32, "mean_ptr": F32, "stride": "i32", "n": "i32"}
    given = {"x_ptr": 2 + seeded(ROWS, n), "y_ptr": empty(ROWS), "mean_ptr": empty(ROWS), "stride": n, "n": n}
    kernel = kernel_from(kernels.moments_of_rows, types, BLOCK=16, GAP=gap)
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr", "mean_ptr"])


def softmax_looped() -> Forward:
    """In two passes over a row."""
    kernel = kernel_from(online.softmax_looped, {"x_ptr": F32, "y_ptr": F32, "stride": "i32", "n": "i32"}, BLOCK=16)
    given = {"x_ptr": 3 * seeded(ROWS, N), "y_ptr": empty(ROWS, N), "stride": N, "n": N}
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


def attention(*, causal: bool = False, guard: bool = False, element: str = "fp32") -> Forward:
    """Two heads of 40 rows in blocks of 16, so that the last one is cut."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), f"*{element}")
    types |= {"lse_ptr": F32, "n": "i32", "scale": "fp32"}
    n = 40
    given = {
        "q_ptr": seeded(2, n, 16), "k_ptr": seeded(2, n, 16, seed=1), "v_ptr": seeded(2, n, 16, seed=2),
        "o_ptr": empty(2, n, 16), "lse_ptr": empty(2, n), "n": n, "scale": 0.25,
    }  # fmt: skip
    constants = {"D": 16, "BLOCK_M": 16, "BLOCK_N": 16, "CAUSAL": causal, "GUARD": guard}
    kernel = kernel_from(online.attention, types, **constants)
    return ran(kernel, (3, 2), given, ["q_ptr", "k_ptr", "v_ptr"], ["o_ptr", "lse_ptr"])


def segment_logsumexp() -> Forward:
    """Of segments between bounds that are floats, of which a launch knows nothing."""
    types = {"x_ptr": F32, "bounds_ptr": F32, "y_ptr": F32}
    bounds = torch.tensor([0, 5, 25, 37], dtype=torch.float64)
    given = {"x_ptr": 3 * seeded(N), "bounds_ptr": bounds, "y_ptr": empty(3)}
    return ran(kernel_from(online.segment_logsumexp, types, BLOCK=8), (3,), given, ["x_ptr"], ["y_ptr"])


def spread_of_a_row() -> Forward:
    """The largest less the smallest, of one loop."""
    given = {"x_ptr": seeded(ROWS, N), "y_ptr": empty(ROWS), "stride": N, "n": N}
    kernel = kernel_from(kernels.spread_of_a_row, {"x_ptr": F32, "y_ptr": F32, "stride": "i32", "n": "i32"}, BLOCK=16)
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


def log_sum_in_whole_tiles(last: str = "", *, n: int = N) -> Forward:
    """Of tiles without a mask, and one with it for what is left."""
    types = {"x_ptr": F32, "lse_ptr": F32, "stride": "i32", "n": "i32"}
    given = {"x_ptr": 3 * seeded(ROWS, n), "lse_ptr": empty(ROWS), "stride": n, "n": n}
    kernel = kernel_from(online.log_sum_in_whole_tiles, types, BLOCK=16, LAST=last)
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["lse_ptr"])


def two_log_sums(*, planes: bool) -> Forward:
    """Of one loop, stored to planes of one tensor, or at a distance that nobody knows."""
    types = {"x_ptr": F32, "y_ptr": F32, "lse_ptr": F32, "stride": "i32", "n": "i32", "distance": "i32"}
    given = {
        "x_ptr": 3 * seeded(ROWS, N), "y_ptr": empty(ROWS), "lse_ptr": empty(2 * ROWS), "stride": N, "n": N,
        "distance": ROWS,
    }  # fmt: skip
    kernel = kernel_from(online.two_log_sums, types, BLOCK=16, PLANES=planes)
    return ran(kernel, (ROWS,), given, ["x_ptr"], ["y_ptr"])


def softmax_of_some_trips(kind: str, *, blind: bool = False) -> Forward:
    """Of the trips that memory names, over 6 of 8 lanes. `blind`: one of them has only minus infinity."""
    lanes, trips = 6, 5
    types = dict.fromkeys(("x_ptr", "v_ptr", "on_ptr", "z_ptr", "y_ptr", "lse_ptr"), F32)
    x = 2 * seeded(trips, lanes, 4)
    if blind:
        x[:, 2] = -math.inf
    given = {
        "x_ptr": x, "v_ptr": seeded(trips, lanes, 4, seed=1), "z_ptr": seeded(lanes, seed=2),
        "on_ptr": torch.tensor([1, 0, 1, 1, 0]).double(), "y_ptr": torch.zeros(8).double(),
        "lse_ptr": torch.zeros(8).double(), "n": trips, "lanes": lanes,
    }  # fmt: skip
    kernel = kernel_from(online.softmax_of_some_trips, {**types, "n": "i32", "lanes": "i32"}, BLOCK=8, KIND=kind)
    return ran(kernel, (1,), given, ["x_ptr", "v_ptr", *(["z_ptr"] if kind == "instead" else [])], ["y_ptr"])


def states_of_a_recurrence(where: str, kept_in: str = F32) -> Forward:
    """The last state; what each step started with is kept in rows that are apart, in some that overlap, or in one."""
    types = {"x_ptr": F32, "kept_ptr": kept_in, "y_ptr": F32, "steps": "i32", "width": "i32", "apart": "i32"}
    kept = torch.zeros(5, 6, dtype=torch.float64)
    given = {"x_ptr": seeded(5, 6) / 4, "kept_ptr": kept, "y_ptr": empty(8), "steps": 5, "width": 6, "apart": 1}
    kernel = kernel_from(kernels.states_of_a_recurrence, types, BLOCK=8, WHERE=where)
    return ran(kernel, (1,), given, ["x_ptr"], ["y_ptr"])


def states_that_mix(outside: float) -> Forward:
    """A recurrence whose steps sum over all lanes of the state, some of which are beyond what is kept of it."""
    types = {"x_ptr": F32, "kept_ptr": F32, "y_ptr": F32, "steps": "i32", "width": "i32"}
    kept = torch.zeros(5, 6, dtype=torch.float64)
    given = {"x_ptr": seeded(5, 6) / 4, "kept_ptr": kept, "y_ptr": empty(6), "steps": 5, "width": 6}
    kernel = kernel_from(kernels.states_that_mix, types, BLOCK=8, OUTSIDE=outside)
    return ran(kernel, (1,), given, ["x_ptr"], ["y_ptr"])


def mixture(kind: str = "") -> Forward:
    """Three softmaxes of a row, weighted, in a tile with room for four."""
    types = dict.fromkeys(("x_ptr", "p_ptr", "y_ptr", "lse_ptr"), F32) | {"parts": "i32", "n": "i32"}
    given = {
        "x_ptr": 2 * seeded(ROWS, 3, N), "p_ptr": seeded(ROWS, 3, seed=1), "y_ptr": empty(ROWS, N),
        "lse_ptr": empty(ROWS, 3), "parts": 3, "n": N,
    }  # fmt: skip
    kernel = kernel_from(online.mixture, types, PARTS=4, BLOCK=16, KIND=kind)
    return ran(kernel, (ROWS,), given, ["x_ptr", "p_ptr"], ["y_ptr"])
