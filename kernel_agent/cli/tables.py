"""`Listing`: rows for people and for pipes. A name, a path or an id is whole, however narrow the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

PROSE = 12
"""Characters that a column of prose has at least."""


@dataclass
class Listing:
    """A table: drawn on a terminal that is wide enough, one line of tab-separated values per row elsewhere."""

    title: str
    columns: Sequence[str]
    folding: frozenset[str] = frozenset()
    """Columns of prose, which may go over several lines; the others never break."""
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *values: str) -> None:
        """One row."""
        self.rows.append(values)

    def show(self, console: Console) -> None:
        """Print it; without decoration also where the terminal is too narrow for a table with whole names."""
        table = self._drawn()
        wide = console.options.update(max_width=1 << 16)
        if console.is_terminal and Measurement.get(console, wide, table).minimum <= console.width:
            console.print(table)
            return
        for row in (tuple(self.columns), *self.rows):
            print("\t".join(row), file=console.file)  # rich would turn the tabs into blanks

    def _drawn(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            folds = column in self.folding
            table.add_column(column, no_wrap=not folds, overflow="fold", min_width=PROSE if folds else None)
        for row in self.rows:
            table.add_row(*row)
        return table
