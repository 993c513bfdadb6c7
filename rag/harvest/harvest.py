"""`harvest`: the pairs of a local checkout and why each other candidate is none. Nothing of it is imported or run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from kernel_agent.errors import InputError
from rag.harvest.candidates import Candidate, Finder
from rag.harvest.checkout import LARGEST, Checkout
from rag.harvest.closure import Gatherer
from rag.harvest.context import raises_only
from rag.harvest.head import commit_of
from rag.harvest.kernels import Kernels
from rag.harvest.render import Origin, Rendered, meta_text, render
from rag.harvest.report import Found, HarvestReport, Kind, Reason, Skipped
from rag.harvest.resolve import Resolver
from rag.licences import Licences

LONGEST = 120_000
"""Characters of a pair's code; more fits into no prompt."""


def harvest(
    root: Path,
    *,
    family: str = "",
    taken: Collection[str] = (),
    on_file: Callable[[str], None] | None = None,
) -> HarvestReport:
    """Scan a folder with source code. Raises `InputError` where there is none.

    `family`: what META calls the collection; the folder's name where it is empty. `taken`: slugs that others have.
    `on_file` is told each file with a candidate.
    """
    scan = _Scan(Checkout(root), family, taken)
    found: list[Found] = []
    skipped: list[Skipped] = []
    for candidate in scan.candidates():
        if on_file is not None:
            on_file(candidate.module.path)
        try:
            result = scan.judge(candidate)
        except InputError as error:
            result = scan.left(candidate, Reason.HELPER_MISSING, f"{error.path}: {error.message}")
        except RecursionError:
            result = scan.left(candidate, Reason.TOO_LARGE, "its expressions are nested too deeply")
        if isinstance(result, Found):
            found.append(result)
        else:
            skipped.append(result)
    skipped += scan.finder.skipped
    large = f"more than {LARGEST} bytes"
    skipped += [Skipped(reason=Reason.TOO_LARGE, name="", file=file, detail=large) for file in scan.checkout.large]
    return HarvestReport(
        repository=scan.repository,
        family=scan.family,
        commit=scan.commit,
        files=len(scan.checkout.files),
        found=tuple(sorted(found, key=lambda one: (one.file, one.line))),
        skipped=tuple(sorted(skipped, key=lambda one: (one.file, one.line))),
    )


class _Scan:
    """One pass over a checkout."""

    def __init__(self, checkout: Checkout, family: str, taken: Collection[str]) -> None:
        self.checkout = checkout
        self.resolver = Resolver(checkout)
        self.kernels = Kernels(self.resolver)
        self.finder = Finder(self.resolver, self.kernels)
        self.licences = Licences(checkout.root)
        self.repository = checkout.root.name
        self.family = family or slug_of(self.repository)
        self.commit = commit_of(checkout.root)
        self._codes: dict[str, str] = {}
        self._slugs: set[str] = set(taken)
        self._used: set[int] = set()
        """Functions that a Function or an operator is made of."""

    def candidates(self) -> Iterator[Candidate]:
        """Functions and operators first: two functions that they are made of are no pair of their own."""
        yield from self.finder.functions()
        yield from self.finder.operators()
        for candidate in self.finder.couples():
            halves = {id(candidate.forward_function), id(candidate.backward_function)}
            if not halves & self._used and self._is_couple(candidate):
                yield candidate

    def _is_couple(self, candidate: Candidate) -> bool:
        """Two functions are a candidate only where both get to kernels: names alone say little."""
        gatherer = Gatherer(self.resolver, self.kernels)
        halves = (candidate.forward, candidate.backward)
        try:
            return all(gatherer.touches(gatherer.gather(half).pieces).reached for half in halves)
        except (InputError, RecursionError):
            return False

    def left(self, candidate: Candidate, reason: Reason, detail: str = "") -> Skipped:
        """A candidate that is no entry."""
        return Skipped(
            reason=reason, name=candidate.name, file=candidate.module.path, line=candidate.line, detail=detail
        )

    def judge(self, candidate: Candidate) -> Found | Skipped:
        """The entry that a candidate gives, or why it gives none."""
        gatherer = Gatherer(self.resolver, self.kernels, candidate.family)
        ahead = gatherer.gather([*candidate.forward, *candidate.setup])
        back = gatherer.gather(candidate.backward)
        self._used |= {id(piece.node) for half in (ahead, back) for piece in half.pieces}
        forward, backward = gatherer.touches(ahead.pieces), gatherer.touches(back.pieces)
        if not candidate.forward:
            return self.left(candidate, Reason.NO_KERNEL, "it has no forward")
        if not forward.reached:
            return self._without_kernel(candidate, ahead.missing, forward.outside, Reason.NO_KERNEL)
        if not candidate.backward:
            said = "nothing is registered with register_autograd" if candidate.kind is Kind.OPERATOR else ""
            return self.left(candidate, Reason.NO_BACKWARD, said)
        if candidate.backward_function is not None and raises_only(candidate.backward_function):
            return self.left(candidate, Reason.NO_BACKWARD, "its backward raises")
        if not backward.reached:
            return self._without_kernel(candidate, back.missing, backward.outside, Reason.BACKWARD_NO_KERNEL)
        missing = [*ahead.missing, *back.missing]
        if missing:
            return self.left(candidate, Reason.HELPER_MISSING, "; ".join(dict.fromkeys(missing)))
        if ahead.too_large or back.too_large:
            return self.left(candidate, Reason.TOO_LARGE, "it needs too many statements of the checkout")
        return self._entry(candidate, render(candidate, gatherer, self.resolver, ahead, back))

    def _without_kernel(self, candidate: Candidate, missing: list[str], outside: str, reason: Reason) -> Skipped:
        if missing:
            return self.left(candidate, Reason.HELPER_MISSING, "; ".join(dict.fromkeys(missing)))
        if outside:
            return self.left(candidate, Reason.KERNEL_ELSEWHERE, f"it launches `{outside}`")
        return self.left(candidate, reason)

    def _entry(self, candidate: Candidate, rendered: Rendered) -> Found | Skipped:
        if rendered.unbound:
            names = ", ".join(f"`{name}`" for name in rendered.unbound)
            return self.left(candidate, Reason.HELPER_MISSING, f"{names} is bound nowhere")
        if len(rendered.code) > LONGEST:
            return self.left(candidate, Reason.TOO_LARGE, f"{len(rendered.code)} characters")
        place = f"{candidate.module.path}:{candidate.line}"
        first = self._codes.setdefault(rendered.code, place)
        if first != place:
            return self.left(candidate, Reason.DUPLICATE, first)
        licence = self.licences.strictest(rendered.files)
        slug = self._slug(candidate)
        meta = meta_text(candidate, rendered, Origin(self.repository, self.commit, licence.name), slug, self.family)
        return Found(
            kind=candidate.kind,
            name=candidate.name,
            file=candidate.module.path,
            line=candidate.line,
            files=rendered.files,
            licence=licence.name,
            licence_from=licence.file,
            grads=rendered.grads,
            runnable=rendered.adapter is not None,
            slug=slug,
            text=rendered.text(meta),
        )

    def _slug(self, candidate: Candidate) -> str:
        """The name of the entry's file: the candidate's, with its file's before it where that is taken."""
        name = slug_of(candidate.name)
        stem = slug_of(Path(candidate.module.path).stem)
        tries = [name, f"{stem}_{name}", *(f"{stem}_{name}_{number}" for number in range(2, 10_000))]
        slug = next(one for one in tries if one not in self._slugs)
        self._slugs.add(slug)
        return slug


def slug_of(name: str) -> str:
    """A name in lower case with underscores: `LayerNormFunction` gives `layer_norm_function`."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    slug = re.sub(r"[^a-z0-9]+", "_", parted.lower()).strip("_")
    return slug if slug[:1].isalpha() else f"x_{slug}".rstrip("_")
