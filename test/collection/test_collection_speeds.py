"""Measurements are lines that survive a sitting's end, whatever a pair does to the process that measures it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kernel_agent.collection.sitting import Measured, Options, left_over, sit
from kernel_agent.collection.speeds import PairSpeed, SpeedBook, SpeedStatus, spread_out
from kernel_agent.errors import InputError
from kernel_agent.pairs.spec import content_hash
from rag.speeds import read_speeds

GPU = "GPU of this test"
WORKER = (sys.executable, str(Path(__file__).with_name("stand_in_worker.py")))


def pairs_in(folder: Path, *names: str) -> list[Path]:
    """Files `<family>/<slug>.py`; what is in them does not matter here."""
    found = []
    for name in names:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
        found.append(path)
    return found


@pytest.fixture
def book(tmp_path: Path) -> SpeedBook:
    """An empty file of results."""
    return SpeedBook(tmp_path / "results" / "gpu.jsonl")


def options_of(**changes: float | bool) -> Options:
    """One pair at a time."""
    return Options(**{"device": GPU, "jobs": 1, **changes})  # type: ignore[arg-type]


def measure(files: list[Path], book: SpeedBook, **changes: float | bool) -> list[PairSpeed]:
    """A whole sitting with real processes."""
    events = list(sit(files, book, options_of(**changes), WORKER))
    return [speed for event in events if isinstance(event, Measured) for speed in event.speeds]


def test_a_hanging_or_crashing_pair_is_one_line_and_the_next_goes_on(tmp_path, book):
    files = pairs_in(tmp_path, "a/crashes", "b/hangs", "c/fine")
    found = {speed.slug: speed.status for speed in measure(files, book, limit_s=10.0)}
    assert found == {
        "crashes": SpeedStatus.CRASHED,
        "hangs": SpeedStatus.TIMED_OUT,
        "fine": SpeedStatus.MEASURED,
    }
    assert {speed.slug for speed in book.read()} == set(found)


def test_the_pair_after_one_whose_process_cannot_go_on_is_measured_by_another_process(tmp_path, book):
    # Given to the process that is about to end, it would be told as a crash of its own.
    files = pairs_in(tmp_path, "a/unclean", "b/fine", "c/unclean_too", "d/fine_too")
    assert {speed.status for speed in measure(files, book)} == {SpeedStatus.MEASURED}


def test_a_faster_text_goes_to_its_own_folder_and_the_pair_stays(tmp_path, book):
    # Written in place, a text that only the native tier has seen would be the dataset's; unwritten, the sweep is lost.
    kept, tuned = pairs_in(tmp_path, "a/fine", "b/tunes")
    options = Options(GPU, 1, variants=4, write=tmp_path / "faster")
    events = {event.path: event for event in sit([kept, tuned], book, options, WORKER) if isinstance(event, Measured)}
    assert events[kept].faster is None
    faster = events[tuned].faster
    assert faster == tmp_path / "faster" / "b" / "tunes.py"
    assert faster.read_text() == "# b/tunes\n# with 8 warps\n"
    assert tuned.read_text() == "# b/tunes\n"


def test_what_is_recorded_for_this_gpu_is_left_out_the_next_time(tmp_path, book):
    files = pairs_in(tmp_path, "a/one", "b/two")
    measure(files[:1], book)
    assert left_over(files, book, options_of()) == files[1:]
    assert left_over(files, book, options_of(fresh=True)) == files
    assert left_over(files, book, Options("another GPU", 1)) == files


def test_an_edited_pair_is_measured_again_and_its_old_line_goes(tmp_path, book):
    (path,) = pairs_in(tmp_path, "a/one")
    measure([path], book)
    path.write_text("# another text\n")
    assert left_over([path], book, options_of()) == [path]
    measure([path], book)
    (line,) = book.read()
    assert line.hash == content_hash("# another text\n")


def test_a_sitting_ends_on_time_and_keeps_what_it_measured(tmp_path, book):
    # A GPU is lent for minutes: what was measured by then must be in the file.
    files = pairs_in(tmp_path, "a/fine", "b/hangs", "c/never")
    found = measure(files, book, seconds=10.0)
    assert [speed.slug for speed in found] == ["fine"]
    assert [speed.slug for speed in book.read()] == ["fine"]
    assert left_over(files, book, options_of()) == files[1:]


def test_families_take_turns(tmp_path):
    files = pairs_in(tmp_path, "a/x", "a/y", "a/z", "b/x", "c/x", "c/y")
    assert [f"{path.parent.name}/{path.stem}" for path in spread_out(files)] == [
        *("a/x", "b/x", "c/x"),
        *("a/y", "c/y"),
        "a/z",
    ]


def test_lines_are_sorted_and_the_same_after_a_rerun(tmp_path, book):
    files = pairs_in(tmp_path, "b/one", "a/two")
    measure(files, book)
    first = book.path.read_text()
    assert [json.loads(line)["family"] for line in first.splitlines()] == ["a", "b"]
    measure(files, book)
    assert book.path.read_text() == first


def test_a_line_that_was_cut_off_is_measured_again_and_a_strange_one_is_told(tmp_path, book):
    files = pairs_in(tmp_path, "a/one", "a/two")
    measure(files, book)
    whole = book.path.read_text()
    book.path.write_text(whole[:-40])
    assert left_over(files, book, options_of()) == files[1:]
    book.path.write_text("what is this\n" + whole)
    with pytest.raises(InputError, match="no measurement") as caught:
        book.read()
    assert caught.value.line == 1


def test_retrieval_reads_times_and_passes_over_failures(tmp_path, book):
    files = pairs_in(tmp_path, "a/crashes", "c/fine")
    measure(files, book)
    speeds = read_speeds(book.path.parent)
    assert speeds.notice == ""
    assert [slug for slug, _ in speeds.measured] == ["fine"]
