"""`Truths`: the exact forward and gradients of one spec, computed once in truth children and kept by content."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.errors import EnvironmentProblem, InputError
from kernel_agent.oracle.cache import Entry, make_cache
from kernel_agent.oracle.cotangents import Cotangents, unit_cotangents
from kernel_agent.oracle.digest import tensor_digest
from kernel_agent.oracle.fit import Fit
from kernel_agent.oracle.job import LIMITS, run_truth
from kernel_agent.oracle.once import Once
from kernel_agent.oracle.provenance import Provenance, Source, now, versions
from kernel_agent.oracle.records import (
    ForwardTruth,
    GradientTruth,
    OutputForm,
    Point,
    Refusal,
    RefusalKind,
    TruthError,
)
from kernel_agent.oracle.side_by_side import side_by_side
from kernel_agent.oracle.wire import unpack
from kernel_agent.pairs.sections import truth_source
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry, content_hash
from kernel_agent.sandbox import Limits, Message, Sandbox

if TYPE_CHECKING:
    from kernel_agent.oracle.sampled import FullSize

OUTPUT_ROUNDOFF = 16 * torch.finfo(torch.float64).eps
"""Norm of an output over that of an input up to which the output is rounding of a zero: some ulps of float64."""
DRAWN_FROM = 1 << 30
"""Seeds beyond which drawn ones begin: chosen ones are small."""

_ENTRIES_OF_TWO = 4
"""Entries from which on two children compute forwards: a child costs as much as some small forwards."""


@dataclass(frozen=True)
class Request:
    """Cotangents whose gradients are wanted at one point."""

    forward: ForwardTruth
    sets: tuple[Cotangents, ...]


@dataclass(frozen=True)
class Wanted:
    """One set of cotangents that is not known yet."""

    forward: ForwardTruth
    cotangents: Cotangents

    @property
    def place(self) -> str:
        """The point, as a key."""
        return self.forward.point.model_dump_json()


@dataclass(frozen=True)
class Found:
    """The gradients of one set of cotangents."""

    grads: dict[str, Tensor]
    provenance: Provenance


@dataclass(frozen=True)
class Unanswered:
    """A point at which there are no exact gradients."""

    point: Point
    error: TruthError | InputError


class Truths:
    """Answers about one spec.

    `cache_dir` None keeps them in memory only, out of every candidate's reach. A folder is for where no candidate runs,
    or for where `sandbox.why_reachable` finds no way to it.
    """

    def __init__(
        self, spec: KernelSpec, sandbox: Sandbox, cache_dir: Path | None = None, limits: Limits = LIMITS
    ) -> None:
        self.spec = spec
        self.sandbox = sandbox
        self._cache = make_cache(cache_dir)
        self._limits = limits
        self.drawn_seed = _drawn()
        """Nobody can foresee it: what is right for known inputs alone is wrong there. Cases are named by it, so that it
        is no secret any more once an author was told of one: see `draw_again`."""
        self._unanswered: dict[str, TruthError | InputError] = {}
        """By point: what need not be tried twice in one process, a time limit of minutes above all."""
        self.lowered: dict[str, str] = {}
        """The IR of the forward's kernels as truth children have lowered them: see `ir.lower.know`."""
        self.looks: Once[FullSize] = Once()
        """By asked size: what `sampled.at_full_size` saw there."""
        self._kernels = content_hash(truth_source(spec.facts.source))
        self._base = (
            versions().model_dump(),
            self._kernels,
            spec.facts.stub,
            list(spec.grads),
            [output.needs_grad for output in spec.outputs],
        )

    def draw_again(self) -> None:
        """Draw another seed, since whoever writes the next candidate knows this one."""
        self.drawn_seed = _drawn()

    def fit(self, entries: Sequence[ShapeEntry], *, max_elements: int, max_volume: int) -> tuple[Fit, ...]:
        """Halve entries until their arguments have at most `max_elements` elements; see `oracle.fit`."""
        payload = {
            "entries": [entry.model_dump(mode="json") for entry in entries],
            "max_elements": max_elements,
            "max_volume": max_volume,
        }
        key = self._key("fit", payload)
        found = self._cache.get(key)
        if found is None:
            messages = self._run("fitted", payload)
            found = Entry({"fits": [message.record["fit"] for message in messages]}, {})
            self._cache.put(key, found)
        return tuple(Fit.model_validate(fit) for fit in found.record["fits"])

    def forwards(self, points: Sequence[Point]) -> tuple[ForwardTruth | Refusal, ...]:
        """The forward at each point, or why there is none; what is not known yet runs in one child, or much in two."""
        keys = [self._key("forward", point.model_dump(mode="json")) for point in points]
        missing = [i for i, key in enumerate(keys) if self._cache.get(key) is None]
        shares = _shares(missing, [points[i].entry.label for i in missing])
        found = side_by_side(lambda share, left: self._all_forwards([points[i] for i in share], left), shares)
        for share, messages in zip(shares, found, strict=True):
            for i, message in zip(share, messages, strict=True):
                self._keep_forward(points[i], keys[i], message)
        entries = [self._cache.get(key) for key in keys]
        return tuple(self._forward(point, entry) for point, entry in zip(points, entries, strict=True))

    def forward(self, point: Point) -> ForwardTruth:
        """The forward at one point. Raises `TruthError` where it refuses."""
        (found,) = self.forwards([point])
        if isinstance(found, Refusal):
            raise TruthError(f"the forward has no answer at {point.label}: {found}")
        return found

    def gradients(self, forward: ForwardTruth, sets: Sequence[Cotangents]) -> tuple[GradientTruth, ...]:
        """Exact gradients at one point for several sets of cotangents, each with one entry per output.

        Raises `TruthError` where the forward cannot be differentiated.
        """
        for unanswered in self.prepare([Request(forward, tuple(sets))]):
            raise unanswered.error
        positions = _differentiable(forward)
        found = [self._gradient(forward, c) for c in (*_units(forward), *sets)]
        per_unit = {i: entry.grads for i, entry in zip(positions, found, strict=False)}
        outputs = range(len(forward.forms))
        units = {
            name: tuple(_rms(per_unit[i].get(name)) if i in per_unit else 0.0 for i in outputs)
            for name in self.spec.grads
        }
        natural = {name: self._natural(forward, name) for name in self.spec.grads}
        return tuple(
            GradientTruth({name: f.grads.get(name) for name in self.spec.grads}, units, natural, f.provenance)
            for f in found[len(positions) :]
        )

    def prepare(self, requests: Sequence[Request]) -> tuple[Unanswered, ...]:
        """Compute what `gradients` will be asked for, all that is not known yet in one child.

        The result names the points whose forward cannot be differentiated here: `gradients` raises there.
        """
        missing: list[Wanted] = []
        asked: set[str] = set()
        for request in requests:
            if request.forward.point.model_dump_json() in self._unanswered:
                continue
            for cotangents in (*_units(request.forward), *request.sets):
                key = self._gradient_key(request.forward, cotangents)
                if key not in asked and self._cache.get(key) is None:
                    missing.append(Wanted(request.forward, cotangents))
                asked.add(key)
        if missing:
            self._compute(missing)
        points = {request.forward.point.model_dump_json(): request.forward.point for request in requests}
        return tuple(
            Unanswered(point, self._unanswered[key]) for key, point in points.items() if key in self._unanswered
        )

    def _compute(self, missing: list[Wanted]) -> None:
        tensors: dict[str, Tensor] = {}
        payload: list[dict[str, Any]] = []
        for i, wanted in enumerate(missing):
            where, cotangents = wanted.forward.point.model_dump(mode="json"), wanted.cotangents
            if not payload or payload[-1]["point"] != where:
                payload.append({"point": where, "sets": []})
            tensors |= {f"{i}.{j}": c for j, c in enumerate(cotangents) if c is not None}
            payload[-1]["sets"].append([None if c is None else f"{i}.{j}" for j, c in enumerate(cotangents)])
        try:
            messages = self._run("gradients", {"requests": payload, "lowered": self.lowered}, tensors)
        except (TruthError, InputError) as error:
            points = list(dict.fromkeys(wanted.place for wanted in missing))
            if len(points) == 1:
                self._unanswered[points[0]] = error
                return
            # One point too large must not take the others with it.
            first = points[: len(points) // 2]
            self._compute([wanted for wanted in missing if wanted.place in first])
            self._compute([wanted for wanted in missing if wanted.place not in first])
            return
        if len(messages) != len(missing):
            raise _silent(self.spec, len(missing) - len(messages))
        for wanted, message in zip(missing, messages, strict=True):
            label = wanted.forward.point.label
            if "refusal" in message.record:
                refusal = Refusal.model_validate(message.record["refusal"])
                self._unanswered.setdefault(wanted.place, TruthError(f"no exact gradients at {label}: {refusal}"))
            elif message.record["arguments"] != wanted.forward.provenance.arguments:
                self._unanswered[wanted.place] = TruthError(
                    f"make_args gives other values each time it is called at {label}",
                    remedy="Draw them from the `seed` parameter, or from torch's global generator, which is seeded.",
                )
            else:
                source = Source.SURROGATE if self.spec.custom_gradient else Source.KERNELS
                provenance = self._provenance(f"gradients at {label}", source, message)
                record = {**message.record, "provenance": provenance.model_dump(mode="json")}
                self._cache.put(self._gradient_key(wanted.forward, wanted.cotangents), Entry(record, message.tensors))

    def _keep_forward(self, point: Point, key: str, message: Message) -> None:
        if "refusal" in message.record:
            refusal = Refusal.model_validate(message.record["refusal"])
            # another machine, or a less busy one, may have the time and the memory
            lasting = refusal.kind is not RefusalKind.RESOURCES
            self._cache.put(key, Entry(message.record, message.tensors), lasting=lasting)
            return
        provenance = self._provenance(f"forward at {point.label}", Source.KERNELS, message)
        self.lowered.update(message.record.pop("lowered"))
        record = {**message.record, "provenance": provenance.model_dump(mode="json")}
        self._cache.put(key, Entry(record, message.tensors))

    def _provenance(self, what: str, source: Source, message: Message) -> Provenance:
        return Provenance(
            what=what,
            source=source,
            kernels=self._kernels,
            arguments=message.record["arguments"],
            launches=tuple(message.record["launches"]),
            when=now(),
            seconds=message.record["seconds"],
            versions=versions(),
        )

    def _gradient_key(self, forward: ForwardTruth, cotangents: Cotangents) -> str:
        digests = [None if c is None else tensor_digest(c) for c in cotangents]
        point = forward.point.model_dump(mode="json")
        return self._key("gradient", point, forward.provenance.arguments, digests)

    def _gradient(self, forward: ForwardTruth, cotangents: Cotangents) -> Found:
        entry = self._cache.get(self._gradient_key(forward, cotangents))
        if entry is None:
            raise TruthError("the truth cache lost an entry that was just written")
        grads = {name: entry.tensors[f"grad.{name}"] for name in entry.record["names"]}
        return Found(grads, Provenance.model_validate(entry.record["provenance"]))

    def _all_forwards(self, points: list[Point], left: threading.Event) -> list[Message]:
        """A message for each point."""
        found: list[Message] = []
        while len(found) < len(points):
            answered = self._run_forwards(points[len(found) :], left)
            if not answered:
                raise _silent(self.spec, len(points) - len(found))
            found += answered
        return found

    def _run_forwards(self, points: list[Point], left: threading.Event) -> list[Message]:
        """Messages for a non-empty beginning of `points`: a point that kills the child is answered with a refusal."""
        payload = {"points": [point.model_dump(mode="json") for point in points]}
        try:
            return list(self._run("forwards", payload, cancelled=left))
        except TruthError as error:
            if len(points) > 1:
                return self._run_forwards(points[: len(points) // 2], left)
            refusal = Refusal(kind=RefusalKind.RESOURCES, message=error.message)
            return [Message({"refusal": refusal.model_dump(mode="json")}, {})]

    def _run(
        self,
        entry: str,
        payload: dict[str, Any],
        tensors: dict[str, Tensor] | None = None,
        cancelled: threading.Event | None = None,
    ) -> tuple[Message, ...]:
        whole = {"spec": self.spec.model_dump(mode="json"), **payload}
        facts = self.spec.facts
        return run_truth(self.sandbox, f"child:{entry}", facts, whole, tensors, self._limits, cancelled=cancelled)

    def _forward(self, point: Point, entry: Entry | None) -> ForwardTruth | Refusal:
        if entry is None:
            raise TruthError("the truth cache lost an entry that was just written")
        record = entry.record
        if "refusal" in record:
            return Refusal.model_validate(record["refusal"])
        forms = [
            None
            if form is None
            else OutputForm(
                tuple(form["shape"]),
                getattr(torch, form["dtype"]),
                form["differentiable"],
                tuple(form["strides"]),
                form["on_host"],
                form["shares"],
            )
            for form in record["forms"]
        ]
        return ForwardTruth(
            point,
            unpack(record["args"], entry.tensors),
            unpack(record["kwargs"], entry.tensors),
            unpack(record["outputs"], entry.tensors),
            tuple(forms),
            tuple(record["launches"]),
            tuple(record["torch_ops"]),
            tuple(record["findings"]),
            tuple(record["mutated"]),
            record["seconds"],
            Provenance.model_validate(record["provenance"]),
        )

    def _natural(self, forward: ForwardTruth, name: str) -> tuple[float, ...]:
        value = forward.argument(self.spec, name)
        positions = _differentiable(forward)
        size = _finite_norm(value) if isinstance(value, Tensor) else 0.0
        return tuple(
            gain(_finite_norm(output), size) if i in positions else 0.0 for i, output in enumerate(forward.outputs)
        )

    def _key(self, *parts: Any) -> str:
        return hashlib.sha256(json.dumps([self._base, parts], sort_keys=True).encode()).hexdigest()


def _shares(numbers: Sequence[int], entries: Sequence[str]) -> list[list[int]]:
    """What two children work off, each all points of an entry: they lower the same kernels. Few are one share."""
    distinct = list(dict.fromkeys(entries))
    if len(distinct) < _ENTRIES_OF_TWO:
        return [list(numbers)] if numbers else []
    first = frozenset(distinct[::2])
    pairs = list(zip(numbers, entries, strict=True))
    return [[n for n, entry in pairs if (entry in first) is mine] for mine in (True, False)]


def gain(output: float, value: float) -> float:
    """The size of a gradient by units alone: norm of an output over norm of an input.

    An output that is itself rounding of a zero, such as the log of a softmax over one class, has no unit to tell: 1.
    """
    if value <= 0.0:
        return 0.0
    return 1.0 if output <= OUTPUT_ROUNDOFF * value else output / value


def _drawn() -> int:
    return DRAWN_FROM + secrets.randbelow(1 << 30)


def _silent(spec: KernelSpec, count: int) -> EnvironmentProblem:
    """A truth child that finished without an answer: nothing in the user's file can explain that."""
    return EnvironmentProblem(
        f"the truth child of {spec.facts.path.name} finished with {count} questions unanswered",
        remedy="Run `kernel-agent doctor`.",
    )


def _differentiable(forward: ForwardTruth) -> list[int]:
    return [i for i, form in enumerate(forward.forms) if form is not None and form.differentiable]


def _units(forward: ForwardTruth) -> list[Cotangents]:
    """Cotangents that measure the gradient scale of each output."""
    return [unit_cotangents(forward.forms, position, forward.point.seed) for position in _differentiable(forward)]


def _rms(gradient: Tensor | None) -> float:
    if gradient is None or gradient.numel() == 0:
        return 0.0
    return float(gradient.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())


def _finite_norm(values: Tensor) -> float:
    return float(values.to(torch.float64).nan_to_num(0.0, 0.0, 0.0).norm())
