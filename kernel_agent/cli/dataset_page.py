"""`kernel-agent dataset page`: all pairs on one page to browse, and the list of them in Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_agent.cli.own_pairs import Own
from kernel_agent.cli.streams import err


def page(
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("generated/pairs.html"),
    markdown: Annotated[
        Path | None, typer.Option(help="Write the list of shipped pairs here instead, such as datasets/INDEX.md.")
    ] = None,
    own: Annotated[bool, typer.Option("--own/--no-own", help="With your own pairs.")] = True,
    index: Own = None,
) -> None:
    """Make a page of all pairs: filters, a search box, forward beside backward, measured speed.

    [bold]kernel-agent dataset page && xdg-open generated/pairs.html[/]
    """
    from kernel_agent.cli.own_checks import own_standings
    from kernel_agent.collection import page as pages
    from kernel_agent.collection.catalogue import catalogue, row_of
    from kernel_agent.collection.pairfiles import pair_files
    from kernel_agent.data import pairs_root
    from kernel_agent.wholefile import write_whole

    shipped = pair_files([pairs_root()])
    if markdown is not None:
        write_whole(markdown, catalogue([row_of(path) for path in shipped]))
        err().print(f"listed {len(shipped)} pairs in {markdown}", soft_wrap=True)
        return
    standings = own_standings(index) if own else {}
    rows = pages.page_rows([*shipped, *standings], standings)
    write_whole(output, pages.page(rows))
    err().print(f"{len(rows)} pairs in {output}", soft_wrap=True)
