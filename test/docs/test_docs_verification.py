"""The tables of docs/verification.md say what the commands that make them print."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "verification.md").read_text()


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def between(name: str) -> list[str]:
    return TEXT.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0].splitlines()


def test_the_table_of_rules_is_what_the_mutants_and_honest_gradients_give(sandbox):
    # Written by hand it would go on saying so after a rule, a class of mutants or the suite has changed.
    assert list(script("rules").table(sandbox)) == between("rules")


def test_the_table_of_mutants_is_what_the_record_holds():
    mutants = script("mutants")
    reports = mutants.read(ROOT / "bench" / "mutants.jsonl")
    assert list(mutants.table(reports)) == between("mutants")
    text = (ROOT / "bench" / "mutants.txt").read_text()
    assert "\n".join(mutants.summary(reports)) + "\n" == text
