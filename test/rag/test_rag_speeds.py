"""What was measured of a pair's backward is told with it, and nothing else is."""

import json
import shutil
from pathlib import Path

import pytest

from kernel_agent.pairs.spec import content_hash
from rag import Query, build_index, search
from rag.speeds import read_speeds

PAIRS = Path(__file__).parent / "pairs"


@pytest.fixture
def measured(tmp_path, pair_source):
    """Writes lines about `softmax_one_row` beside a copy of the small pairs; returns what a search says of the pair."""
    shutil.copytree(PAIRS, tmp_path / "pairs")
    index = build_index(tmp_path / "pairs", tmp_path / "pairs" / "index", dense=False)
    source = pair_source("softmax_one_row")
    line = {"slug": "softmax_one_row", "hash": content_hash(source), "device": "NVIDIA H200", "entry": "M=64 N=100"}

    def write(*changes):
        (tmp_path / "results").mkdir()
        lines = [json.dumps({**line, "backward_us": 10.0, "bound_us": 5.0, **change}) for change in changes]
        (tmp_path / "results" / "h200.jsonl").write_text("\n".join(lines) + "\n")
        result = search(Query(source), index)
        return next(hit.pair.speed for hit in result.hits if hit.pair.slug == "softmax_one_row"), result.notice

    return write


def test_a_measured_pair_says_its_percent_of_the_bound(measured):
    assert measured({})[0] == "50 % of the bound on NVIDIA H200 (1 shape)"


def test_several_shapes_give_a_range(measured):
    speed, _ = measured({"bound_us": 7.1}, {"entry": "M=1 N=1"})
    assert speed == "50 to 71 % of the bound on NVIDIA H200 (2 shapes)"


def test_a_shape_measured_again_counts_as_of_its_last_time(measured):
    assert measured({"bound_us": 9.0}, {"bound_us": 6.0})[0] == "60 % of the bound on NVIDIA H200 (1 shape)"


def test_a_shape_too_small_to_tell_is_not_told(measured):
    # 5 x 64 elements take as long as a kernel takes to start: 1 % of the bound says nothing of the kernel.
    assert measured({}, {"entry": "M=5 N=64", "bound_us": 0.02})[0] == "50 % of the bound on NVIDIA H200 (1 shape)"


def test_a_pair_that_changed_since_it_was_measured_is_unmeasured(measured):
    assert measured({"hash": "of another text"})[0] == ""


@pytest.mark.parametrize("change", [{"backward_us": 0.0}, {"bound_us": "fast"}, {"backward_us": float("nan")}])
def test_a_line_that_is_no_measurement_is_told_and_the_others_count(measured, change):
    speed, notice = measured({}, {"entry": "M=1 N=1", **change})
    assert speed == "50 % of the bound on NVIDIA H200 (1 shape)"
    assert "h200.jsonl line 2" in notice


def test_without_a_folder_nothing_is_known(tmp_path):
    speeds = read_speeds(tmp_path / "nowhere")
    assert speeds.words("softmax_one_row", "any") == ""
    assert speeds.notice == ""
