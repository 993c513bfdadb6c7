"""`kernel-agent rag`: search the pairs, and build an index over others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import InputError

rag = typer.Typer(name="rag", help="Search the proven pairs, or index others.", no_args_is_help=True)


@rag.command()
def search(
    file: Annotated[Path, typer.Argument(help="A file with a forward kernel.")],
    topk: Annotated[int, typer.Option(help="How many pairs to choose.")] = 4,
    min_sim: Annotated[float | None, typer.Option(help="Least descriptor cosine. Default: calibrated.")] = None,
    rag_exclude: Annotated[str, typer.Option(help="Comma-separated terms of paths to leave out.")] = "",
    rag_index: Annotated[Path | None, typer.Option(help="Folder of the index to search. Default: the shipped.")] = None,
) -> None:
    """Show the pairs that a run on this file would retrieve."""
    from kernel_agent.cli.tables import Listing
    from kernel_agent.pairs.userfile import read_text
    from rag import Query, load_index
    from rag import search as find

    terms = tuple(term.strip() for term in rag_exclude.split(",") if term.strip())
    with err().status("searching the pairs"):
        query = Query(source=read_text(file), path=file, k=topk, min_sim=min_sim, exclude=terms)
        result = find(query, load_index(rag_index))
    columns = ("", "pair", "similarity", "fused", "dense", "lexical", "structure", "why")
    table = Listing(f"nearest pairs for {file.name}", columns, folding=frozenset({"why"}))
    for hit in result.hits:
        scores = hit.scores
        ranks = (
            "" if rank is None else f"#{rank}"
            for rank in (scores.dense_rank, scores.lexical_rank, scores.structure_rank)
        )
        name = f"{hit.pair.family}/{hit.pair.slug}"
        table.add(
            "*" if hit.chosen else "", name, f"{scores.similarity:.2f}", f"{scores.fused:.4f}", *ranks, hit.reason
        )
    table.show(out())
    for term in result.unmatched_excludes:
        err().print(f"no pair matches the excluded term {term!r}", soft_wrap=True)
    if result.notice:
        err().print(result.notice, soft_wrap=True)


@rag.command()
def build(
    folder: Annotated[Path, typer.Argument(help="Folder of pair files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the index to.")],
) -> None:
    """Build a retrieval index over a folder of pair files."""
    from rag import build_index

    if not folder.is_dir():
        raise InputError("there is no such folder", path=folder, remedy="name a folder that holds pair files")
    with err().status(f"indexing {folder}"):
        index = build_index(folder, output)
    err().print(f"indexed {len(index.entries)} pairs into {output}", soft_wrap=True)
