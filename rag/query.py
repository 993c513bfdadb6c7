"""What is asked of retrieval and what it answers: records that a ledger can keep and a prompt can show."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rag.licences import shows


def licence_words(licence: str) -> str:
    """A harvested pair's licence in words."""
    return licence or "no licence found"


class Signal(str, enum.Enum):
    """A way to compare a query with the pairs."""

    DENSE = "dense"
    """Cosine of embedded descriptions."""
    LEXICAL = "lexical"
    """Cosine of tf-idf weights over words and Triton operations."""
    STRUCTURE = "structure"
    """Cosine of operations, of what feeds what and of how memory is walked, names taken away."""


class Exclusion(str, enum.Enum):
    """Why a hit is not chosen."""

    TERM = "excluded by term"
    DISSIMILAR = "below min-sim"
    NEAR_IDENTICAL = "near-identical backward"
    UNLICENSED = "not shown"
    BEYOND_K = "beyond top k"
    NO_ROOM = "no room"


@dataclass(frozen=True)
class QueryVector:
    """An embedded description, and the model that made it."""

    made_by: str
    """`Embedding.identity` of the model. For an index of another one, the query is embedded anew."""
    numbers: tuple[float, ...]
    """The vector, of unit length: [d]."""


@dataclass(frozen=True)
class Query:
    """A forward that looks for pairs like it."""

    source: str
    """Text of the user's file, or of a pair file."""
    path: Path | None = None
    """Where the text comes from: its stem counts as a name of the operator, errors carry it. Never read."""
    k: int = 4
    """How many pairs to choose at most."""
    min_sim: float | None = None
    """Least similarity of a chosen pair, in [0, 1], by the signal that judges; None: a pair is similar that reaches the
    calibrated default of any signal."""
    vector: QueryVector | None = None
    """The embedded `rag.embedded_text` of the source where it is known already; None: it is embedded when wanted."""
    unlicensed: bool = False
    """Harvested pairs without a licence may be chosen."""
    room: int | None = None
    """Characters of forward and backward that the chosen pairs have together at most; None: any number. A pair that
    does not fit is passed over for a smaller one."""
    explain: bool = False
    """Whether hits say what they share with the query."""
    exclude: tuple[str, ...] = ()
    """Pairs whose path contains one of these, in any case, are not chosen. Blank ones are ignored."""

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of `exclude`, trimmed, without blank ones: a blank one would match every path."""
        return tuple(term.strip() for term in self.exclude if term.strip())


@dataclass(frozen=True)
class RetrievedPair:
    """A whole pair, never cut."""

    slug: str
    """Name of the pair; its file's stem."""
    family: str
    """Folder of the pair's taxonomy."""
    path: Path
    """Relative to the folder of pairs, such as `norm_row/rmsnorm_row.py`."""
    docstring: str
    """First paragraph of the module's docstring, on one line."""
    forward: str
    """Text of the forward section without its marker."""
    backward: str
    """Text of the backward section without its marker."""
    techniques: tuple[str, ...] = ()
    """Tags of the closed list, as META says."""
    grads: tuple[str, ...] = ()
    """Inputs whose gradients the backward returns, in order."""
    speed: str = ""
    """Measured percent of the cost counter's bound, in words; empty when this text was never measured."""
    verified: bool = True
    """False: no gate has passed it yet."""
    own: bool = False
    """One of the user's, not of those that ship with the package."""
    repository: str = ""
    """Where it was harvested; empty for a pair that was not."""
    licence: str = ""
    """SPDX expression; of a harvested pair empty where none was found."""

    @property
    def may_be_shown(self) -> bool:
        """Whether its licence lets others learn from it. A pair that was not harvested is the user's or ours."""
        return not self.repository or shows(self.licence)

    @property
    def standing(self) -> str:
        """What to say beside its name: whose it is, whether it is proven, its licence; empty for a shipped pair."""
        if not self.own:
            return ""
        said = ["own", "proven" if self.verified else "unverified"]
        if self.repository:
            said += [f"from {self.repository}", licence_words(self.licence)]
        return ", ".join(said)

    @property
    def size(self) -> int:
        """Characters of forward and backward."""
        return len(self.forward) + len(self.backward)


@dataclass(frozen=True)
class Scores:
    """How a pair compares with the query. Ranks start at 1; a signal that was not used is None."""

    similarity: float
    """The cosine that `min_sim` judges, of the signal named in `SearchResult.judged_by`."""
    fused: float
    """Sum of weight / (60 + rank) over the signals: what the order of hits follows."""
    dense: float | None = None
    """Cosine of embedded descriptions, in [-1, 1]."""
    dense_rank: int | None = None
    """Rank by `dense` and its like in the pair's family."""
    lexical: float | None = None
    """Cosine of tf-idf weights, in [0, 1]."""
    lexical_rank: int | None = None
    """Rank by `lexical` and its like in the pair's family."""
    structure: float | None = None
    """Cosine of structure, in [0, 1]."""
    structure_rank: int | None = None
    """Rank by `structure`."""

    def of(self, signal: Signal) -> float | None:
        """Cosine by a signal; None where it was not used."""
        return {Signal.DENSE: self.dense, Signal.LEXICAL: self.lexical, Signal.STRUCTURE: self.structure}[signal]

    def rank_of(self, signal: Signal) -> int | None:
        """Rank by a signal; None where it was not used."""
        ranks = {Signal.DENSE: self.dense_rank, Signal.LEXICAL: self.lexical_rank}
        return {**ranks, Signal.STRUCTURE: self.structure_rank}[signal]


@dataclass(frozen=True)
class Hit:
    """One pair among the best, chosen or not."""

    pair: RetrievedPair
    """The pair itself."""
    scores: Scores
    """Why it stands where it stands."""
    excluded: Exclusion | None = None
    """Why it is not chosen; None for a chosen pair."""
    detail: str = ""
    """What the exclusion refers to: the term, the threshold, the pair that is near-identical."""
    shared: tuple[str, ...] = ()
    """With `Query.explain`: what adds most to the cosine of the signal that counts most, best first."""

    @property
    def chosen(self) -> bool:
        """Whether the pair is to be shown."""
        return self.excluded is None

    @property
    def reason(self) -> str:
        """The exclusion in words, empty for a chosen pair."""
        return "" if self.excluded is None else f"{self.excluded.value}: {self.detail}"


@dataclass(frozen=True)
class SearchResult:
    """The answer to a query."""

    hits: tuple[Hit, ...]
    """The ten best, and any chosen ones beyond them, best first: by fused rank, with near ties decided by measured
    speed, and a pair a little later whose techniques its family has shown."""
    judged_by: Signal
    """The signal whose cosine `min_sim` was compared with."""
    min_sim: float
    """Its threshold. By default, a pair that reaches the threshold of another signal is similar as well."""
    weights: Mapping[Signal, float] = field(default_factory=dict)
    """What each signal that was used counts in the fusion."""
    known: tuple[str, ...] = ()
    """Words of the query that tell what it computes and that the index knows, sorted."""
    unmatched_excludes: tuple[str, ...] = ()
    """Terms of `Query.exclude` that occur in no pair's path."""
    notice: str = ""
    """What the user should know, one sentence a line: nothing similar, no embedding model, a stale index."""

    @property
    def chosen(self) -> tuple[Hit, ...]:
        """The hits to show, best first; at most k."""
        return tuple(hit for hit in self.hits if hit.chosen)
