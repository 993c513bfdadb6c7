"""`OwnPairs`: the user's own pairs in a folder outside of this repository: harvested ones and delivered ones.

own.json                             what was harvested and what a certificate proves
kernel_pairs/<family>/<slug>.py      the pairs; family `user` holds delivered ones, the others are named after checkouts
kernel_pairs/index/                  what retrieval searches
results/verdicts/<family>.jsonl      what the gate said of them
reports/<family>.json                what a harvest found and what it left
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from kernel_agent.certificate.reading import read_certificate
from kernel_agent.certificate.record import Certificate
from kernel_agent.collection.pairfiles import PAIRS, RESULTS
from kernel_agent.collection.verdicts import PairVerdict, VerdictBook
from kernel_agent.data import OWN_INDEX, OWN_STATE, own_root, pairs_root
from kernel_agent.errors import EnvironmentProblem, InputError
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import CHECK_MARKER, split_sections
from kernel_agent.pairs.spec import content_hash
from kernel_agent.pairs.syntax import parse
from kernel_agent.record import Record
from kernel_agent.wholefile import write_whole
from rag.embed import missing_packages
from rag.harvest import HarvestReport, harvest
from rag.harvest.harvest import slug_of

USER = "user"
"""Family of delivered pairs."""


class Harvested(Record):
    """Where a family was harvested."""

    path: str = Field(description="the checkout")
    commit: str = ""


class OwnState(Record):
    """What `own.json` holds."""

    version: int = 1
    harvests: dict[str, Harvested] = Field(default={}, description="by family")
    certified: dict[str, str] = Field(
        default={}, description="content hash of pairs that a certificate proves, by path below kernel_pairs"
    )


class OwnPairs:
    """A folder of own pairs. Commands that change it take turns."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: None for the user's own folder for data. Nothing is made or read yet."""
        self.folder = own_root() if folder is None else folder
        self.pairs = self.folder / PAIRS
        self.index = self.folder / OWN_INDEX
        self.book = VerdictBook(self.folder / RESULTS)

    @classmethod
    def around(cls, pair: Path) -> OwnPairs | None:
        """The folder of own pairs that a file belongs to; None for a file elsewhere."""
        root = pair.resolve().parent.parent
        return cls(root.parent) if root.name == PAIRS and (root.parent / OWN_STATE).is_file() else None

    @property
    def exists(self) -> bool:
        """Whether anything was ever added."""
        return (self.folder / OWN_STATE).is_file()

    def state(self) -> OwnState:
        """What `own.json` says. Raises `InputError` where it says something else."""
        path = self.folder / OWN_STATE
        try:
            return OwnState.model_validate_json(path.read_bytes()) if path.is_file() else OwnState()
        except ValidationError:
            remedy = "Delete it; harvest and add again, then kernel-agent dataset reindex."
            raise InputError("this is no record of own pairs", path=path, remedy=remedy) from None

    def files(self) -> list[Path]:
        """All pairs, by family and name."""
        return sorted(self.pairs.glob("*/*.py"))

    def verified(self, path: Path, state: OwnState, book: Mapping[str, PairVerdict]) -> bool:
        """Whether the text of a pair is proven: by the gate here, or by the certificate it came with."""
        known = content_hash(path.read_text(encoding="utf-8"))
        verdict = book.get(path.stem)
        judged = verdict is not None and verdict.hash == known
        return verdict.green if verdict is not None and judged else state.certified.get(self._name(path)) == known

    def find(self, name: str) -> Path | None:
        """A pair by `slug` or `family/slug`. Raises `InputError` where several have the slug."""
        pattern = f"{name}.py" if "/" in name else f"*/{name}.py"
        found = sorted(self.pairs.glob(pattern)) if re.fullmatch(r"[\w/]+", name) else []
        if len(found) > 1:
            names = ", ".join(f"{path.parent.name}/{path.stem}" for path in found)
            raise InputError(f"several own pairs are called {name!r}", remedy=f"name one of: {names}")
        return found[0] if found else None

    def add_harvest(self, root: Path) -> HarvestReport:
        """Harvest a checkout into a family of its own. One that was harvested before is brought up to date.

        SWEEP and make_args that were added to an entry are kept while its code is still found. Raises `InputError`
        where there is no such folder, `EnvironmentProblem` where nothing can be written.
        """
        with self._changing():
            state = self.state()
            family = self._family(root, state)
            before = {path.stem: path for path in sorted((self.pairs / family).glob("*.py"))}
            taken = self._slugs() - before.keys()
            report = harvest(root, family=family, taken=taken)
            changed = []
            for found in report.found:
                path = self.pairs / family / f"{found.slug}.py"
                text = _with_check_of(path, found.text)
                if not path.is_file() or path.read_text(encoding="utf-8") != text:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
                    changed.append(path)
            gone = [path for stem, path in before.items() if stem not in {found.slug for found in report.found}]
            self._forget(gone)
            self._learn(changed, verified=False)
            told = json.dumps({"path": str(root.resolve()), **report.as_json()}, indent=2, ensure_ascii=False)
            write_whole(self.report_path(family), told + "\n")
            harvested = Harvested(path=str(root.resolve()), commit=report.commit)
            self._write_state(state.model_copy(update={"harvests": {**state.harvests, family: harvested}}))
            return report

    def add_delivered(self, folder: Path) -> Path:
        """Take the delivered pair of a result folder, as its certificate proves it. Returns where it is now.

        Raises `InputError` for a folder without a green certificate, or with a file that is not the certified one.
        """
        certificate, source = _delivered(folder)
        with self._changing():
            state = self.state()
            wanted = slug_of(folder.resolve().name)
            before = self.pairs / USER / f"{wanted}.py"
            slug = wanted if before.is_file() else _free(wanted, self._slugs())
            path = self.pairs / USER / f"{slug}.py"
            text = with_slug(source, slug)
            write_whole(path, text)
            write_whole(path.with_suffix(".certificate.json"), certificate.model_dump_json(indent=2) + "\n")
            certified = {**state.certified, self._name(path): content_hash(text)}
            self._learn([path], verified=True)
            self._write_state(state.model_copy(update={"certified": certified}))
            return path

    def remove(self, paths: Iterable[Path]) -> None:
        """Delete pairs and what is known of them."""
        with self._changing():
            gone = list(paths)
            state = self.state()
            self._forget(gone)
            names = {self._name(path) for path in gone}
            certified = {name: known for name, known in state.certified.items() if name not in names}
            left = {path.parent.name for path in self.files()}
            harvests = {family: known for family, known in state.harvests.items() if family in left}
            self._write_state(state.model_copy(update={"certified": certified, "harvests": harvests}))

    def settle(self, paths: Iterable[Path]) -> None:
        """Let retrieval know what a check has found out about pairs."""
        with self._changing():
            state = self.state()
            books: dict[str, dict[str, PairVerdict]] = {}
            sides: dict[bool, list[Path]] = {True: [], False: []}
            for path in paths:
                family = path.resolve().parent.name
                books.setdefault(family, self.book.family(family))
                sides[self.verified(path, state, books[family])].append(path)
            for verified, some in sides.items():
                self._learn(some, verified=verified)

    def reindex(self) -> int:
        """Make the index again from the pairs and their verdicts. Returns how many there are."""
        import shutil

        if self.index.is_dir():
            shutil.rmtree(self.index)
        files = self.files()
        self.settle(files)
        return len(files)

    def report_path(self, family: str) -> Path:
        """What a harvest found and what it left."""
        return self.folder / "reports" / f"{family}.json"

    def _family(self, root: Path, state: OwnState) -> str:
        """The family of a checkout: that of its last harvest, else its folder's name, unless another has it."""
        place = str(root.resolve())
        known = next((family for family, harvested in state.harvests.items() if harvested.path == place), None)
        shipped = {path.name for path in pairs_root().iterdir()}
        return known or _free(slug_of(root.resolve().name), {*state.harvests, *shipped, USER})

    def _slugs(self) -> set[str]:
        """Names that are taken, by shipped pairs too: a run tells pairs by their names."""
        return {path.stem for root in (pairs_root(), self.pairs) for path in root.glob("*/*.py")}

    def _learn(self, paths: list[Path], *, verified: bool) -> None:
        from rag import add_pairs

        if paths:
            add_pairs(
                self.index,
                self.pairs,
                [path.resolve() for path in paths],
                verified=verified,
                dense=not missing_packages(),
            )

    def _forget(self, paths: list[Path]) -> None:
        from rag import load_index, remove_pairs

        if not paths:
            return
        known = {entry.path for entry in load_index(self.index).entries}
        names = [Path(name) for path in paths if (name := self._name(path)) in known]
        if names:
            remove_pairs(self.index, names)
        for path in paths:
            path.unlink()
            path.with_suffix(".certificate.json").unlink(missing_ok=True)

    def _name(self, path: Path) -> str:
        return path.resolve().relative_to(self.pairs.resolve()).as_posix()

    def _write_state(self, state: OwnState) -> None:
        write_whole(self.folder / OWN_STATE, state.model_dump_json(indent=2) + "\n")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            self.pairs.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.pairs, os.O_RDONLY)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot keep own pairs in {self.folder}: {error.strerror or error}",
                remedy="Name another folder with --index.",
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not self.exists:
                self._write_state(OwnState())
            yield
        finally:
            os.close(handle)


def with_slug(source: str, slug: str) -> str:
    """The text of a pair file with another name in META."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "META" for t in node.targets):
            call = node.value
            keywords = call.keywords if isinstance(call, ast.Call) else []
            for keyword in keywords:
                if keyword.arg == "slug":
                    return _replaced(source, keyword.value, json.dumps(slug))
    return source


def _replaced(source: str, node: ast.expr, text: str) -> str:
    lines = source.split("\n")
    line = lines[node.lineno - 1].encode("utf-8")
    lines[node.lineno - 1] = (line[: node.col_offset] + text.encode("utf-8") + line[node.end_col_offset :]).decode(
        "utf-8"
    )
    return "\n".join(lines)


def _with_check_of(path: Path, text: str) -> str:
    """A harvested text with the check section that its file has now: the user may have written it."""
    if not path.is_file():
        return text
    try:
        old, new = split_sections(path.read_text(encoding="utf-8")), split_sections(text)
    except InputError:
        return text
    written = any(isinstance(node, (ast.FunctionDef, ast.Assign)) for node in parse(old.check).body)
    return f"{new.above_check}{CHECK_MARKER}\n{old.check}" if written else text


def _free(name: str, taken: set[str]) -> str:
    return next(
        one for number in range(1, len(taken) + 3) if (one := name if number == 1 else f"{name}_{number}") not in taken
    )


def _delivered(folder: Path) -> tuple[Certificate, str]:
    """The certificate of a result folder and the text it speaks of."""
    remedy = "Name the folder that kernel-agent --file-path has written, such as generated/layernorm-1a2b3c4d/."
    path = folder / "certificate.json"
    if not path.is_file():
        raise InputError("there is no certificate here", path=folder, remedy=remedy)
    certificate = read_certificate(path)
    if not certificate.verdict.green:
        raise InputError("the certificate is not green", path=path, remedy="Only proven backwards can be added.")
    pair = folder / Path(certificate.delivered).name
    source = pair.read_text(encoding="utf-8") if pair.is_file() else ""
    import hashlib

    if hashlib.sha256(source.encode()).hexdigest() != certificate.hashes.delivered:
        raise InputError(
            f"{pair.name} is not the file that was proven",
            path=pair,
            remedy="It was changed since: run kernel-agent --file-path again, or undo the change.",
        )
    read_meta(source)
    return certificate, source
