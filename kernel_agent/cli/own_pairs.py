"""`kernel-agent dataset add`, `harvest`, `show`, `remove`, `reindex`: pairs of the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_agent.cli.streams import err, out
from kernel_agent.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from kernel_agent.collection.own import OwnPairs
    from kernel_agent.pairs.meta import PairMeta
    from rag.harvest import HarvestReport

Own = Annotated[
    Path | None, typer.Option("--index", help="Folder of own pairs. Default: kernel-agent in your folder for data.")
]
BAR = 24
"""Characters of the longest bar."""


def add(
    folder: Annotated[Path, typer.Argument(help="A result folder of kernel-agent --file-path.")],
    index: Own = None,
) -> None:
    """Take a delivered, proven pair among your own: later runs retrieve it.

    [bold]kernel-agent dataset add generated/layernorm-1a2b3c4d/[/]
    """
    from kernel_agent.collection.own import OwnPairs

    own = OwnPairs(index)
    with err().status("indexing"):
        path = own.add_delivered(folder)
    err().print(f"added {path.parent.name}/{path.stem}, proven by its certificate: {path}", soft_wrap=True)


def harvest(
    path: Annotated[Path, typer.Argument(help="A local checkout.")],
    index: Own = None,
    everything: Annotated[bool, typer.Option("--all", help="List every candidate that is no pair.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Find the pairs of a local checkout and keep them among your own, unverified; none of its code is run.

    [bold]kernel-agent dataset harvest ~/src/some-library[/]
    """
    from kernel_agent.collection.own import OwnPairs

    own = OwnPairs(index)
    with err().status(f"reading {path}"):
        report = own.add_harvest(path)
    if as_json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
        return
    _show_report(report, everything=everything)
    err().print(f"kept in {own.pairs / report.family}; the report: {own.report_path(report.family)}", soft_wrap=True)


def _show_report(report: HarvestReport, *, everything: bool) -> None:
    from kernel_agent.cli.tables import Listing
    from rag.licences import shows
    from rag.query import licence_words

    commit = f" at {report.commit[:12]}" if report.commit else ""
    title = f"{report.repository}{commit}: {len(report.found)} pairs in {report.files} files"
    found = Listing(
        title, ("pair", "written as", "where", "gradients", "licence", "shown", "to prove it"), frozenset({"gradients"})
    )
    for one in report.found:
        found.add(
            f"{report.family}/{one.slug}",
            one.kind.value,
            f"{one.file}:{one.line}",
            ", ".join(one.grads),
            licence_words(one.licence),
            "yes" if shows(one.licence) else "with --rag-unlicensed",
            "add SWEEP, make_args" if one.runnable else "for reading only",
        )
    found.show(out())
    if out().is_terminal:
        for heading, counts in _counts(report):
            out().print(_bars(heading, counts))
    if report.skipped and (everything or not out().is_terminal):
        left = Listing("left", ("candidate", "where", "why", "detail"), frozenset({"detail"}))
        for other in report.skipped:
            left.add(other.name or "the file", f"{other.file}:{other.line}", other.reason.value, other.detail)
        left.show(out())
    elif report.skipped:
        err().print(f"{len(report.skipped)} candidates are no pairs; --all lists them with what is wrong")


def _counts(report: HarvestReport) -> list[tuple[str, dict[str, int]]]:
    """What the bars show: why candidates were left, under which licences the others are."""
    from collections import Counter

    from rag.query import licence_words

    licences = Counter(licence_words(found.licence) for found in report.found)
    reasons = {"found": len(report.found), **{reason.value: count for reason, count in report.reasons.items()}}
    return [("candidates", reasons), ("licences", dict(licences.most_common()))]


def _bars(heading: str, counts: dict[str, int]) -> Table:
    from rich.table import Table

    table = Table(title=heading, title_justify="left", show_header=False, box=None)
    longest = max(counts.values(), default=0)
    for name, count in counts.items():
        table.add_row(name, str(count), "█" * max(round(BAR * count / longest), 1) if count else "")
    return table


def show(
    name: Annotated[str, typer.Argument(help="A pair: its name, or family/name.")],
    index: Own = None,
) -> None:
    """Show one pair, your own or a shipped one: what is known of it, and its text."""
    from kernel_agent.pairs.meta import read_meta
    from rag.query import licence_words

    own, path, shipped = _found(name, index)
    source = path.read_text(encoding="utf-8")
    meta = read_meta(source)
    facts = [
        ("pair", f"{path.parent.name}/{path.stem}"),
        ("file", str(path)),
        ("gradients", ", ".join(meta.grads)),
        ("techniques", ", ".join(meta.techniques)),
        ("standing", "shipped, proven" if shipped else _standing(own, path)),
        ("licence", licence_words(meta.license) if meta.repository else meta.license),
        ("from", _place(meta) if meta.repository else ""),
    ]
    for what, said in facts:
        if said:
            err().print(f"{what:<11} {said}", soft_wrap=True, markup=False)
    if out().is_terminal:
        from rich.syntax import Syntax

        out().print(Syntax(source, "python", theme="ansi_dark"))
    else:
        print(source, end="")


def _found(name: str, index: Path | None) -> tuple[OwnPairs, Path, bool]:
    """A pair's file, and whether it ships with the package."""
    import difflib

    from kernel_agent.collection.own import OwnPairs
    from kernel_agent.data import pairs_root

    own = OwnPairs(index)
    mine = own.find(name)
    if mine is not None:
        return own, mine, False
    shipped = {path.stem: path for path in pairs_root().glob("*/*.py")}
    slug = name.rpartition("/")[2]
    if slug in shipped and name in (slug, f"{shipped[slug].parent.name}/{slug}"):
        return own, shipped[slug], True
    near = difflib.get_close_matches(slug, [*shipped, *(path.stem for path in own.files())], n=3)
    remedy = f"did you mean {', '.join(near)}?" if near else "kernel-agent dataset list shows all"
    raise InputError(f"there is no pair {name!r}", remedy=remedy)


def _standing(own: OwnPairs, path: Path) -> str:
    state, book = own.state(), own.book.family(path.parent.name)
    if own.verified(path, state, book):
        return "own, proven"
    verdict = book.get(path.stem)
    return f"own, unverified{f': {verdict.status.value}' if verdict is not None else ''}"


def _place(meta: PairMeta) -> str:
    """Where a pair was harvested."""
    extra = meta.model_dump()
    commit = f" at {extra['commit'][:12]}" if extra.get("commit") else ""
    return f"{meta.repository}{commit}, {extra.get('file', '')}:{extra.get('line', '')}"


def remove(
    names: Annotated[list[str] | None, typer.Argument(help="Own pairs: names, or family/name.")] = None,
    family: Annotated[str, typer.Option(help="All pairs of this family, such as one checkout's.")] = "",
    index: Own = None,
) -> None:
    """Delete own pairs. Shipped pairs cannot be removed."""
    from kernel_agent.collection.own import OwnPairs

    own = OwnPairs(index)
    if bool(names) == bool(family):
        raise InputError("name pairs, or one family", remedy="kernel-agent dataset list --own shows them")
    gone = [path for path in own.files() if path.parent.name == family] if family else []
    for name in names or ():
        path = own.find(name)
        if path is None:
            remedy = "kernel-agent dataset list --own shows them"
            raise InputError(f"none of your own pairs is called {name!r}", remedy=remedy)
        gone.append(path)
    if not gone:
        raise InputError(f"no own pair belongs to the family {family!r}", remedy="kernel-agent dataset list --own")
    own.remove(dict.fromkeys(gone))
    err().print(f"removed {len(gone)} pair{'' if len(gone) == 1 else 's'}")


def reindex(index: Own = None) -> None:
    """Make the index over own pairs again, as after an update of kernel-agent."""
    from kernel_agent.collection.own import OwnPairs

    own = OwnPairs(index)
    with err().status("indexing"):
        count = own.reindex()
    err().print(f"indexed {count} own pairs in {own.index}", soft_wrap=True)
