"""BENCH is literal: read from the syntax tree, required of dataset entries alone, and told where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.data import pairs_root
from kernel_agent.errors import InputError
from kernel_agent.pairs.benchsizes import read_bench
from kernel_agent.pairs.lint import lint
from kernel_agent.pairs.syntax import parse
from kernel_agent.pairs.userfile import read_file

SOFTMAX = pairs_root() / "softmax" / "softmax_row.py"
LINE = 'BENCH = ({"M": 8192, "N": 4096, "dtype": "float32"},)\n'


def entry_with(tmp_path: Path, bench: str) -> Path:
    """A copy of a good dataset entry with another BENCH."""
    text = SOFTMAX.read_text()
    assert text.count(LINE) == 1
    path = tmp_path / "softmax" / "softmax_row.py"
    path.parent.mkdir()
    path.write_text(text.replace(LINE, bench))
    return path


def test_facts_of_a_pair_hold_its_real_sizes():
    (entry,) = read_file(SOFTMAX).bench
    assert entry.dims == {"M": 8192, "N": 4096, "dtype": "float32"}


def test_a_pair_without_bench_is_read_and_a_dataset_entry_without_it_is_not_accepted(tmp_path):
    path = entry_with(tmp_path, "")
    assert read_file(path).bench == ()
    assert ["BENCH" in str(complaint) for complaint in lint(path)] == [True]


@pytest.mark.parametrize(
    "text", ["BENCH = tuple(SWEEP)", "BENCH = [dict(M=4)]", "BENCH = (open('/tmp/reached', 'w'),)"]
)
def test_bench_is_never_executed(text):
    with pytest.raises(InputError, match="BENCH is not literal") as caught:
        read_bench(parse(text), Path("x.py"))
    assert caught.value.line == 1


@pytest.mark.parametrize(
    ("bench", "said"),
    [
        ('BENCH = ({"M": 8192, "dtype": "float32"},)', "does not say 'N'"),
        ('BENCH = ({"M": 8192, "N": 4096, "K": 2, "dtype": "float32"},)', "'K', which make_args() does not take"),
        ('BENCH = ({"M": 8192, "N": 4096},)', "does not say its dtype"),
        ('BENCH = ({"M": 8192, "N": 4096, "dtype": "float64"},)', "none of META['dtypes']"),
        ('BENCH = ({"M": 1, "N": 1, "dtype": "float32"},) * 3', "BENCH is not literal"),
        ("BENCH = " + str(({"M": 8, "N": 4, "dtype": "float32"},) * 3), "BENCH has 3 entries"),
        ("BENCH = ()", "BENCH is empty"),
    ],
)
def test_lint_says_what_is_wrong_with_bench(tmp_path, bench, said):
    # Each of these would only be found on a GPU, where minutes are scarce.
    (complaint,) = lint(entry_with(tmp_path, bench + "\n"))
    assert said in str(complaint)
