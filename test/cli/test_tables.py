"""Names, paths and ids in tables are whole, however narrow the terminal."""

import io

from command_line import kernel_agent
from rich.console import Console

from kernel_agent.cli.main import run
from kernel_agent.cli.tables import Listing
from kernel_agent.data import pairs_root

RUN = "20260102T030405Z-abcd"
SLUG = "a_pair_whose_name_is_far_longer_than_any_column_of_a_narrow_terminal"


def listing() -> Listing:
    made = Listing("runs", ("run", "pair", "why"), folding=frozenset({"why"}))
    made.add(RUN, SLUG, "as it is the nearest of all those that the search came up with")
    return made


def drawn(width: int, *, terminal: bool) -> str:
    stream = io.StringIO()
    listing().show(Console(file=stream, width=width, force_terminal=terminal, color_system=None))
    return stream.getvalue()


def test_names_are_whole_on_a_narrow_terminal():
    # Rich cuts columns that do not fit and puts "…": a run id without its end cannot be resumed.
    for width in (40, 80, 200):
        text = drawn(width, terminal=True)
        assert RUN in text
        assert SLUG in text
        assert "…" not in text


def test_prose_is_folded_where_the_terminal_is_narrow():
    assert len(drawn(130, terminal=True).splitlines()) > len(drawn(300, terminal=True).splitlines())


def test_a_pipe_gets_one_line_of_tabs_per_row():
    head, row = drawn(80, terminal=False).splitlines()
    assert head == "run\tpair\twhy"
    assert row.split("\t")[:2] == [RUN, SLUG]


def test_every_shipped_pair_is_listed_whole_in_a_pipe(capsys):
    assert run(["dataset", "list"]) == 0
    listed = {line.split("\t")[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert listed == {path.stem for path in pairs_root().rglob("*.py")}


def test_the_paths_of_a_final_table_are_not_folded(tmp_path):
    # 80 columns are what a pipe has; this path is longer.
    from cli_forwards import FORWARD

    home = tmp_path / ("a_folder_with_a_name_that_fills_a_good_part_of_the_line_" * 2)
    home.mkdir()
    (home / "square.py").write_text(FORWARD)
    arguments = (
        "--file-path",
        str(home / "square.py"),
        "--backend",
        "manual",
        "--max-tokens",
        "9",
        "--no-rag",
        "--draft",
        "none",
    )
    ended = kernel_agent(*arguments, "--out", str(home / "out"), cwd=tmp_path)
    (trace,) = [path for path in home.glob("out/*/runs/*/trace.md") if not path.parent.is_symlink()]
    assert f"trace   {trace}" in ended.err.splitlines()
