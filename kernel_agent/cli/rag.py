"""`kernel-agent rag`: search the pairs, and build an index over others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import InputError

if TYPE_CHECKING:
    from rag import Query, SearchResult

rag = typer.Typer(name="rag", help="Search the proven pairs, or index others.", no_args_is_help=True)


@rag.command()
def search(
    file: Annotated[Path, typer.Argument(help="A file with a forward kernel.")],
    topk: Annotated[int, typer.Option(help="How many pairs to choose.")] = 4,
    min_sim: Annotated[float | None, typer.Option(help="Least descriptor cosine. Default: calibrated.")] = None,
    rag_exclude: Annotated[str, typer.Option(help="Comma-separated terms of paths to leave out.")] = "",
    rag_index: Annotated[
        Path | None,
        typer.Option(help="Folder of own pairs or of one index. Default: the shipped pairs and your own."),
    ] = None,
    rag_unlicensed: Annotated[
        bool, typer.Option("--rag-unlicensed", help="Choose harvested pairs without a licence, too.")
    ] = False,
    technique: Annotated[
        str, typer.Option(help="Tag of the closed list: show the pairs that have it, instead of all.")
    ] = "",
    grad: Annotated[str, typer.Option(help="With --technique: the input whose gradient is looked for.")] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show rank and cosine by every signal, and what is shared.")
    ] = False,
) -> None:
    """Show the pairs that a run on this file would retrieve.

    [bold]kernel-agent rag search examples/layernorm.py --topk 4 --explain[/]\n
    [bold]kernel-agent rag search examples/layernorm.py --technique atomics --grad weight[/]
    """
    from kernel_agent.pairs.userfile import read_text
    from rag import Query, open_index
    from rag import search as find

    terms = tuple(term.strip() for term in rag_exclude.split(",") if term.strip())
    if technique:
        _require_technique(technique)
    query = Query(
        source=read_text(file),
        path=file,
        k=topk,
        min_sim=min_sim,
        explain=explain,
        exclude=terms,
        unlicensed=rag_unlicensed,
    )
    if technique:
        _show_technique(query, technique, grad, rag_index)
        return
    with err().status("searching the pairs"):
        result = find(query, open_index(rag_index))
    _show_hits(f"nearest pairs for {file.name}", result, explain=explain)
    for term in result.unmatched_excludes:
        err().print(f"no pair matches the excluded term {term!r}", soft_wrap=True)
    if result.notice:
        err().print(result.notice, soft_wrap=True)


def _show_hits(title: str, result: SearchResult, *, explain: bool) -> None:
    """The hits, best first; explained, with rank and cosine by every signal."""
    from kernel_agent.cli.tables import Listing

    signals = list(result.weights)
    if explain:
        heads = (f"{signal.value} x{result.weights[signal]:.2g}" for signal in signals)
        columns = ("", "pair", "standing", "fused", *heads, "shares", "measured", "why not")
    else:
        columns = ("", "pair", "standing", "similarity", "measured", "why not")
    table = Listing(title, columns, folding=frozenset({"shares", "measured", "why not"}))
    for hit in result.hits:
        scores = hit.scores
        named = ("*" if hit.chosen else "", f"{hit.pair.family}/{hit.pair.slug}", hit.pair.standing or "shipped")
        if explain:
            ranks = (
                "not compared" if (rank := scores.rank_of(signal)) is None else f"#{rank} {scores.of(signal):.2f}"
                for signal in signals
            )
            told = (f"{scores.fused:.4f}", *ranks, ", ".join(hit.shared))
        else:
            told = (f"{scores.similarity:.2f}",)
        table.add(*named, *told, hit.pair.speed, hit.reason)
    table.show(out())
    if explain:
        known = (
            f"{len(result.known)} telling words known: {', '.join(result.known)}" if result.known else "no name tells"
        )
        err().print(f"{known}; judged by {result.judged_by.value}", soft_wrap=True)


def _require_technique(technique: str) -> None:
    import difflib

    from kernel_agent.pairs.techniques import TECHNIQUES

    if technique not in TECHNIQUES:
        near = difflib.get_close_matches(technique, TECHNIQUES, n=3) or list(TECHNIQUES)
        raise InputError(f"there is no technique {technique!r}", remedy=f"one of: {', '.join(near)}")


def _show_technique(query: Query, technique: str, grad: str, index: Path | None) -> None:
    """Pairs with a technique in the order in which a gradient would be given them."""
    from kernel_agent.cli.tables import Listing
    from rag import Wanted, open_index, search_techniques

    listing = Listing(f"pairs with {technique}", ("pair", "similarity", "gradients", "measured", "techniques"))
    found: list[str] = []
    with err().status("searching the pairs"):
        opened = open_index(index)
        while len(found) < query.k:
            wanted = [Wanted(grad, (technique,))]
            matches = search_techniques(wanted, query, shown=found, again=True, n=1, room=sys.maxsize, index=opened)
            if not matches:
                break
            pair, scores = matches[0].pair, matches[0].scores
            found.append(pair.slug)
            name = f"{pair.family}/{pair.slug}"
            others = ", ".join(tag for tag in pair.techniques if tag != technique)
            listing.add(name, f"{scores.similarity:.2f}", ", ".join(pair.grads), pair.speed, others)
    listing.show(out())
    if not found:
        told = f"no pair is given for {technique}: none has it, or so many that it singles out no schedule"
        err().print(told, soft_wrap=True)


@rag.command()
def build(
    folder: Annotated[Path, typer.Argument(help="Folder of pair files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the index to.")],
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="Folder of a sentence-transformers model, or openai:text-embedding-3-small. Default: the bundled one."
        ),
    ] = None,
) -> None:
    """Build a retrieval index over a folder of pair files. Queries are embedded by the model of the index.

    [bold]kernel-agent rag build my_pairs -o my_index --embedding-model ~/models/bge-small[/]
    """
    from rag import build_index

    if not folder.is_dir():
        raise InputError("there is no such folder", path=folder, remedy="name a folder that holds pair files")
    with err().status(f"indexing {folder}"):
        index = build_index(folder, output, model=embedding_model)
    err().print(f"indexed {len(index.entries)} pairs into {output} with {index.embedding.model}", soft_wrap=True)
