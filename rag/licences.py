"""Under which licence a file of a checkout is: what it says itself and what its folders say, the stricter of them.

This reads notices; it gives no legal advice. What is not recognised counts as none, and a notice that reserves all
rights counts as the strictest.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HEADER_LINES = 40
"""Lines at the top of a file in which it may speak of its licence."""

FILES = ("LICENSE", "LICENCE", "COPYING", "UNLICENSE")
"""How files with a folder's licence begin, in any case."""


class Strictness(enum.IntEnum):
    """What a licence asks of who copies, least first."""

    PERMISSIVE = 0
    """Keep the notice."""
    WEAK_COPYLEFT = 1
    """Changed files stay under it."""
    COPYLEFT = 2
    """The whole stays under it."""
    RESTRICTED = 3
    """Some uses are forbidden."""
    NONE = 4
    """No licence was found, or none that is known."""
    RESERVED = 5
    """All rights are reserved."""


_BY_PREFIX = (
    (Strictness.RESTRICTED, ("CC-BY-NC", "CC-BY-ND", "BUSL", "SSPL", "ELASTIC", "COMMONS-CLAUSE", "POLYFORM")),
    (Strictness.COPYLEFT, ("GPL-", "AGPL-", "CC-BY-SA", "EUPL")),
    (Strictness.WEAK_COPYLEFT, ("LGPL-", "MPL-", "EPL-", "CDDL-")),
    (
        Strictness.PERMISSIVE,
        ("MIT", "BSD-", "0BSD", "APACHE-", "ISC", "ZLIB", "UNLICENSE", "CC0-", "CC-BY-4", "CC-BY-3", "BSL-1", "PSF-"),
    ),
)

_TEXTS = (
    (
        "LicenseRef-All-Rights-Reserved",
        r"proprietary and confidential|may not be (copied|used|reproduced|redistributed)",
    ),
    ("AGPL-3.0", r"gnu affero general public licen[sc]e"),
    ("LGPL", r"gnu (lesser|library) general public licen[sc]e"),
    ("GPL", r"gnu general public licen[sc]e"),
    ("MPL-2.0", r"mozilla public licen[sc]e"),
    ("EPL-2.0", r"eclipse public licen[sc]e"),
    ("BUSL-1.1", r"business source licen[sc]e"),
    ("LicenseRef-Non-Commercial", r"non-?commercial (use|purposes|research)"),
    ("CC-BY-NC", r"creative commons attribution-noncommercial"),
    ("Apache-2.0", r"apache licen[sc]e,?\s*(version )?2\.0|licensed under the apache licen[sc]e"),
    ("MIT", r"permission is hereby granted, free of charge|\bmit licen[sc]e\b|under the mit\b"),
    ("BSD-3-Clause", r"redistribution and use in source and binary forms.*(neither the name|endorse or promote)"),
    ("BSD-2-Clause", r"redistribution and use in source and binary forms"),
    ("BSD-3-Clause", r"\bbsd[- ]style licen[sc]e|\bbsd licen[sc]e\b|3-clause bsd|bsd 3-clause"),
    ("ISC", r"permission to use, copy, modify, and/or distribute this software"),
    ("Unlicense", r"free and unencumbered software released into the public domain"),
    ("CC0-1.0", r"cc0 1\.0|creative commons zero"),
)
"""SPDX identifier and what its text or a reference to it says, the more telling first."""

_SPDX = re.compile(r"SPDX-License-Identifier:\s*([^\n*#]+?)\s*(?:\*/|-->|$)", re.MULTILINE)
_RESERVED = re.compile(r"all rights reserved", re.IGNORECASE)
_PROJECT = re.compile(r"^license\s*=\s*(?:\{\s*text\s*=\s*)?[\"']([^\"'\n]+)[\"']", re.MULTILINE)


@dataclass(frozen=True)
class Licence:
    """One licence and where it was read."""

    name: str = ""
    """SPDX expression; empty where none was found."""
    strictness: Strictness = Strictness.NONE
    file: str = ""
    """Relative to the checkout."""


class Licences:
    """The licences of one checkout."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[PurePosixPath, Licence | None] = {}

    def strictest(self, files: Iterable[str]) -> Licence:
        """The strictest licence of some files."""
        return max((self.of(file) for file in files), key=lambda one: one.strictness, default=Licence())

    def of(self, file: str) -> Licence:
        """The stricter of what a file says and what its folders say; one of them where the other says nothing."""
        header = self._header(file)
        folders = [found for parent in PurePosixPath(file).parents if (found := self._folder(parent)) is not None]
        said = [found for found in (header, *folders) if found is not None]
        return max(said, key=lambda one: one.strictness, default=Licence())

    def _header(self, file: str) -> Licence | None:
        lines = self._text(self._root / file).splitlines()[:HEADER_LINES]
        said = [line for line in lines if line.lstrip().startswith(("#", '"""', "'''")) or "SPDX" in line]
        docstring = _docstring("\n".join(lines))
        return read_licence("\n".join([*said, docstring]), file, reserved=True)

    def _folder(self, folder: PurePosixPath) -> Licence | None:
        if folder not in self._folders:
            found = list(self._licence_files(folder))
            self._folders[folder] = max(found, key=lambda one: one.strictness, default=None)
        return self._folders[folder]

    def _licence_files(self, folder: PurePosixPath) -> Iterator[Licence]:
        place = self._root / folder
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            named = path.name.upper().startswith(FILES) and path.suffix.lower() != ".py"
            if named and path.is_file() and not path.is_symlink():
                relative = path.relative_to(self._root).as_posix()
                found = read_licence(self._text(path), relative)
                yield found or Licence(f"LicenseRef-{path.name}", Strictness.NONE, relative)
        project = place / "pyproject.toml"
        match = _PROJECT.search(self._text(project)) if project.is_file() else None
        if match is not None:
            yield licence_of(match.group(1), project.relative_to(self._root).as_posix())

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8", errors="replace")[:200_000]
        except OSError:
            return ""


def read_licence(text: str, file: str, *, reserved: bool = False) -> Licence | None:
    """The licence that a notice speaks of; None where it speaks of none.

    `reserved`: "all rights reserved" with no licence beside it forbids copying. In the files of well-known licences it
    is part of the copyright line.
    """
    spdx = _SPDX.search(text)
    if spdx is not None:
        return licence_of(spdx.group(1), file)
    plain = " ".join(re.sub(r"^[\s#*]+", " ", text, flags=re.MULTILINE).split()).lower()
    for name, pattern in _TEXTS:
        if re.search(pattern, plain):
            return licence_of(name, file)
    if reserved and _RESERVED.search(plain):
        return Licence("LicenseRef-All-Rights-Reserved", Strictness.RESERVED, file)
    return None


def licence_of(expression: str, file: str) -> Licence:
    """The licence of an SPDX expression: of `OR` the mildest, of `AND` the strictest."""
    return Licence(expression.strip(), _strictness(expression), file)


def _strictness(expression: str) -> Strictness:
    """`AND` binds closer than `OR`; brackets closer than both."""
    inner = re.search(r"\(([^()]*)\)", expression)
    while inner is not None:
        found = f"LicenseRef-{_strictness(inner.group(1)).name}"
        expression = f"{expression[: inner.start()]} {found} {expression[inner.end() :]}"
        inner = re.search(r"\(([^()]*)\)", expression)
    choices = re.split(r"\s+OR\s+|/", expression, flags=re.IGNORECASE)
    return min(max(_one(part) for part in re.split(r"\s+AND\s+", one, flags=re.IGNORECASE)) for one in choices)


def _one(identifier: str) -> Strictness:
    """Of one identifier, with an exception perhaps: `Apache-2.0 WITH LLVM-exception`."""
    name = re.split(r"\s+WITH\s+", identifier.strip(), flags=re.IGNORECASE)[0].upper().replace(" ", "-")
    if name.startswith("LICENSEREF-"):
        if name.removeprefix("LICENSEREF-") in Strictness.__members__:
            return Strictness[name.removeprefix("LICENSEREF-")]
        reserved = any(word in name for word in ("RESERVED", "PROPRIETARY"))
        restricted = "COMMERCIAL" in name
        return Strictness.RESERVED if reserved else Strictness.RESTRICTED if restricted else Strictness.NONE
    for strictness, prefixes in _BY_PREFIX:
        if f"{name}-".startswith(prefixes):
            return strictness
    return Strictness.NONE


def _docstring(head: str) -> str:
    """What stands between the first triple quotes."""
    for quotes in ('"""', "'''"):
        _, found, rest = head.partition(quotes)
        if found:
            return rest.partition(quotes)[0]
    return ""


def shows(expression: str) -> bool:
    """Whether a licence lets others read the code and learn from it: not where none was found or all is reserved."""
    return bool(expression) and _strictness(expression) < Strictness.NONE
