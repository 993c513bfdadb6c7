"""Files of a run are whole or absent, and records read back as they were."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from kernel_agent.record import Record
from kernel_agent.wholefile import write_once, write_whole


class Measured(Record):
    """A record with a float."""

    ratio: float


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.5])
def test_a_record_reads_back_from_json_with_its_infinities(value: float) -> None:
    # pydantic writes null for an infinity by default, which no float field reads back.
    assert Measured.model_validate_json(Measured(ratio=value).model_dump_json()).ratio == value


def test_a_record_can_neither_be_changed_nor_hold_what_it_does_not_know() -> None:
    with pytest.raises(ValidationError):
        Measured(ratio=1.0).ratio = 2.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Measured.model_validate({"ratio": 1.0, "more": 1})


def test_a_file_is_replaced_in_one_step_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ask.md"
    write_whole(path, "first")
    handle = path.open(encoding="utf-8")
    write_whole(path, "second, länger")
    assert handle.read() == "first", "who reads the old file reads it to its end"
    handle.close()
    assert path.read_text(encoding="utf-8") == "second, länger"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_exists_is_left_as_it_is_when_written_once(tmp_path: Path) -> None:
    write_once(tmp_path / "a", "first")
    write_once(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"


def test_a_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "a", "half \ud800")
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
