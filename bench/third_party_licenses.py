"""Write THIRD_PARTY_LICENSES.md from the installed, constraint-pinned dependencies; `--check` compares instead.

    python bench/third_party_licenses.py            # writes the file
    python bench/third_party_licenses.py --check    # exit 1 and a diff when the file is out of date

The file describes the set that Python >= 3.11 installs; an older Python has other pins, so the check is not made there.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "THIRD_PARTY_LICENSES.md"
LONGEST_TEXT = 16_000
"""Licence files with more characters (bundled third parties of a wheel) are named, not repeated."""


@dataclass(frozen=True)
class Dependency:
    """One pinned distribution."""

    name: str
    version: str
    licence: str
    texts: tuple[str, ...]
    long_files: tuple[str, ...]


def pinned_names() -> dict[str, str]:
    """Name -> version of constraints.txt as it applies to Python >= 3.11."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        match = re.match(r"([A-Za-z0-9_.\-]+)==([^;\s]+)(?:;\s*(.*))?$", line)
        if match and 'python_version < "3.11"' not in (match[3] or ""):
            pins[match[1]] = match[2]
    return pins


def licence_name(metadata: importlib.metadata.PackageMetadata) -> str:
    """The SPDX expression where declared, else the classifier, else the short free text."""
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [c.split("::")[-1].strip() for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    named = [c for c in classifiers if c not in ("OSI Approved", "DFSG approved")]
    if named:
        return " / ".join(named)
    return str(metadata.get("License") or "see the distribution").splitlines()[0]


def describe(name: str, version: str) -> Dependency:
    """Read one installed distribution. Raises `PackageNotFoundError` when it is not installed."""
    distribution = importlib.metadata.distribution(name)
    texts, long_files = [], []
    for file in sorted(distribution.files or [], key=str):
        if ".dist-info" not in file.parts[0] or not re.match(r"(LICEN[CS]E|COPYING|NOTICE)", file.name, re.I):
            continue
        if len(file.parts) > 3 or name == "torch":
            long_files.append(file.name)
            continue
        text = Path(str(distribution.locate_file(file))).read_text(errors="replace").strip()
        if len(text) > LONGEST_TEXT:
            long_files.append(file.name)
        else:
            texts.append("\n".join(line.rstrip() for line in text.splitlines()))
    return Dependency(name, version, licence_name(distribution.metadata), tuple(texts), tuple(sorted(set(long_files))))


def render(dependencies: list[Dependency]) -> str:
    """The whole file: a table, then each licence text once with the packages it belongs to."""
    lines = [
        "# Third-party licences",
        "",
        "kernel-agent installs these packages; it contains none of their code. Written by",
        "`bench/third_party_licenses.py` from `constraints.txt` (Python 3.11 and newer). Packages without a text below",
        "carry theirs inside their distribution.",
        "",
        "| package | version | licence |",
        "| --- | --- | --- |",
        *(f"| {d.name} | {d.version} | {d.licence} |" for d in dependencies),
    ]
    owners: dict[str, list[str]] = {}
    for dependency in dependencies:
        for text in dependency.texts:
            owners.setdefault(text, []).append(dependency.name)
    for text, names in owners.items():
        lines += ["", f"## {', '.join(dict.fromkeys(names))}", "", "~~~text", text, "~~~"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed file")
    if sys.version_info < (3, 11):
        print("not compared: this Python installs other pins than the ones described")
        return 0
    arguments = parser.parse_args()
    fresh = render(
        [describe(name, version) for name, version in sorted(pinned_names().items(), key=lambda p: p[0].lower())]
    )
    if not arguments.check:
        TARGET.write_text(fresh)
        return 0
    committed = TARGET.read_text() if TARGET.exists() else ""
    if committed == fresh:
        return 0
    diff = difflib.unified_diff(committed.splitlines(), fresh.splitlines(), "committed", "fresh", lineterm="")
    print("\n".join(list(diff)[:40]))
    print("THIRD_PARTY_LICENSES.md is out of date: run python bench/third_party_licenses.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
