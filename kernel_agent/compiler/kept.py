"""`KeptPairs`: proven pairs and refusals on disk, so that what was derived once is not derived again.

An entry is addressed by what it was derived of and by what derived it: the forward's text, the configuration, the
source of the compiler and the gate, the version of Triton. It carries a hash over its text and its verdict; one whose
hash does not fit, or whose verdict is not green, is as good as none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from kernel_agent.compiler.derived import Derived, Draft, DraftCost
from kernel_agent.compiler.errors import CannotDerive, NotThisTime
from kernel_agent.errors import EnvironmentProblem
from kernel_agent.gate.options import STANDARD, GateOptions
from kernel_agent.gate.verdict import Verdict
from kernel_agent.pairs.spec import Candidate, content_hash
from kernel_agent.usercache import user_cache

FORMAT = 2
MOST = 2000
"""Entries of a folder; beyond them those that were not used longest are deleted."""
_ROOMS = ("compiler", "deliver", "gate", "ir", "oracle", "pairs")
"""Rooms of this package whose code decides what is derived and whether it is proven."""
_SUFFIX = ".pair.json"
_REFUSED = ".refused.json"


def user_pairs() -> KeptPairs:
    """The pairs of this user."""
    return KeptPairs(user_cache("derived"))


def derivation_key(*what: str, schedules: Sequence[str] = (), options: GateOptions = STANDARD) -> str:
    """The address of what is derived of `what`, texts that tell one forward and configuration from all others."""
    parts = [content_hash(text) for text in what]
    return _digest(json.dumps([FORMAT, parts, list(schedules), repr(options), _engine()]))


class KeptPairs:
    """Proven pairs in one folder, for any number of processes at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Derived | None:
        """The pair of that key; None where there is none, or its entry is damaged. Raises `EnvironmentProblem`."""
        path = self._path(key)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            return None
        except OSError as error:
            raise self._problem("read", error) from error
        with contextlib.suppress(OSError):  # a folder that may only be read is a cache still
            os.utime(path)
        return _read(text)

    def put(self, key: str, derived: Derived) -> None:
        """Keep a proven pair; its file appears whole or not at all. Raises `EnvironmentProblem`."""
        self._write(self._path(key), _written(derived))

    def refusal(self, key: str) -> CannotDerive | None:
        """Why nothing is derived of that key, as far as is known. Raises `EnvironmentProblem`."""
        try:
            record = json.loads(self._path(key, _REFUSED).read_text(encoding="utf-8"))
            return CannotDerive(record["message"], remedy=record["remedy"], line=record["line"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # damaged: refused again
            return None
        except OSError as error:
            raise self._problem("read", error) from error

    def refuse(self, key: str, error: CannotDerive) -> None:
        """Keep why nothing is derived; what another try may derive is not kept. Raises `EnvironmentProblem`."""
        if not isinstance(error, NotThisTime):
            record = {"message": error.message, "remedy": error.remedy, "line": error.line}
            self._write(self._path(key, _REFUSED), json.dumps(record))

    def _write(self, path: Path, text: str) -> None:
        try:
            self._make()
            file = tempfile.NamedTemporaryFile("w", dir=self.folder, prefix="writing-", delete=False, encoding="utf-8")  # noqa: SIM115
            try:
                with file:
                    file.write(text)
                os.replace(file.name, path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
            self._bound()
        except OSError as error:
            raise self._problem("write", error) from error

    @contextlib.contextmanager
    def deriving(self, key: str) -> Iterator[None]:
        """Be the only process that derives for a key: others wait here, and find the entry when they are let in."""
        try:
            self._make()
            lock = (self.folder / f"{key}.lock").open("w")
        except OSError as error:
            raise self._problem("write", error) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _bound(self) -> None:
        found = []
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # another process deletes too
                found.append((path.stat().st_mtime, path))
        for _, path in sorted(found)[: max(0, len(found) - MOST)]:
            path.unlink(missing_ok=True)
            path.with_name(path.name.partition(".")[0] + ".lock").unlink(missing_ok=True)

    def _path(self, key: str, suffix: str = _SUFFIX) -> Path:
        return self.folder / f"{key}{suffix}"

    def _problem(self, verb: str, error: OSError) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"cannot {verb} the derived pairs kept in {self.folder}: {error.strerror or error}",
            remedy="Make room there or delete the folder: everything in it can be derived again.",
        )


def _written(derived: Derived) -> str:
    draft = derived.draft
    record = {
        "draft": {**dataclasses.asdict(draft), "candidate": draft.candidate.model_dump(mode="json")},
        "verdict": derived.verdict.model_dump(mode="json"),
        "refused": list(derived.refused),
        "seconds": derived.seconds,
        "costs": [dataclasses.asdict(cost) for cost in derived.costs],
    }
    return json.dumps({"format": FORMAT, "sha256": _digest(_canonical(record)), "derived": record})


def _read(text: str) -> Derived | None:
    try:
        entry = json.loads(text)
        record = entry["derived"]
        if entry["format"] != FORMAT or entry["sha256"] != _digest(_canonical(record)):
            return None
        fields = dict(record["draft"])
        fields["candidate"] = Candidate.model_validate(fields["candidate"])
        draft = Draft(**{**fields, "schedules": tuple(fields["schedules"]), "remarks": tuple(fields["remarks"])})
        verdict = Verdict.model_validate(record["verdict"])
        costs = tuple(DraftCost(**{**cost, "schedules": tuple(cost["schedules"])}) for cost in record["costs"])
        found = Derived(draft, verdict, tuple(record["refused"]), record["seconds"], costs)
    except (ValueError, KeyError, TypeError, ValidationError):  # cut short or overwritten: derived again
        return None
    return found if found.verdict.green else None


def _canonical(record: object) -> str:
    return json.dumps(record, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _engine() -> str:
    """What derives and proves here: the source of the rooms that do, and Triton's version."""
    package = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for path in sorted(path for room in _ROOMS for path in (package / room).rglob("*") if path.suffix != ".pyc"):
        if path.is_file():
            total.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    return f"{total.hexdigest()} triton {triton}"
