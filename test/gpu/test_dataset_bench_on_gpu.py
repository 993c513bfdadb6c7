"""A pair of the dataset measured on a real GPU, by the processes that `kernel-agent dataset bench` starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_agent.collection.sitting import Measured, Options, left_over, sit
from kernel_agent.collection.speeds import PairSpeed, SpeedBook, SpeedStatus
from kernel_agent.data import pairs_root
from kernel_agent.pairs.spec import content_hash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="times real kernels: needs a CUDA device"),
]
SOFTMAX = pairs_root() / "softmax" / "softmax_row.py"


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> SpeedBook:
    return SpeedBook(tmp_path_factory.mktemp("results") / "gpu.jsonl")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pair with a factor in its gradient."""
    path = tmp_path_factory.mktemp("kernel_pairs") / "softmax" / "softmax_wrong.py"
    path.parent.mkdir()
    head, backward = SOFTMAX.read_text().split("# --- backward ---")
    start = backward.index("return ", backward.index("def backward("))
    path.write_text(f"{head}# --- backward ---{backward[:start]}return 1.5 * {backward[start + len('return ') :]}")
    return path


@pytest.fixture(scope="module")
def speeds(book: SpeedBook, wrong: Path) -> dict[str, PairSpeed]:
    options = Options(torch.cuda.get_device_name(), jobs=2)
    events = list(sit([SOFTMAX, wrong], book, options))
    found = [speed for event in events if isinstance(event, Measured) for speed in event.speeds]
    assert left_over([SOFTMAX, wrong], book, options) == []
    return {speed.slug: speed for speed in found}


def test_a_right_pair_has_times_a_bound_and_baselines(speeds):
    speed = speeds["softmax_row"]
    assert speed.status is SpeedStatus.MEASURED, speed.message
    assert speed.device == torch.cuda.get_device_name()
    assert speed.backward_us is not None
    assert speed.bound_us is not None
    assert speed.bound_us < speed.backward_us < 100 * speed.bound_us
    assert speed.eager_us is not None
    assert speed.compiled_us is not None
    assert speed.gb_s is not None
    assert speed.atomics == 0
    assert speed.worst is not None
    assert speed.worst <= 1.0
    assert speed.seconds is not None
    assert "proven at M=" in speed.message, "float64 truths of 2**25 elements are not what a sitting waits for"


def test_a_wrong_pair_is_a_line_without_a_time(speeds):
    # A figure beside a wrong gradient would be shown to models as a proven speed.
    speed = speeds["softmax_wrong"]
    assert speed.status is SpeedStatus.RED
    assert speed.backward_us is None


def test_a_badly_chosen_number_of_warps_is_found_and_the_faster_text_measured(tmp_path):
    # A sweep that timed something else than its variants, or kept none, would leave the one warp.
    slow = tmp_path / "softmax" / "softmax_slow.py"
    slow.parent.mkdir()
    head, backward = SOFTMAX.read_text().split("# --- backward ---")
    text = backward.replace("num_warps=max(1, min(16, BLOCK // 512))", "num_warps=1")
    assert text != backward
    slow.write_text(f"{head}# --- backward ---{text}")
    options = Options(torch.cuda.get_device_name(), jobs=1, variants=6, write=tmp_path / "faster")
    events = list(sit([slow], SpeedBook(tmp_path / "gpu.jsonl"), options))
    (found,) = (event for event in events if isinstance(event, Measured))
    assert found.faster is not None, found.speeds
    assert "num_warps=1\n" not in found.faster.read_text()
    (speed,) = found.speeds
    assert speed.hash == content_hash(found.faster.read_text())
