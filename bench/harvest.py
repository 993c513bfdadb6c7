"""Prints how many pairs a harvest finds in the checkouts of test/rag/checkouts, whose manifests say what is there.

    python bench/harvest.py

Each checkout is original code that writes pairs as libraries do; `manifest.json` lists every complete pair and, for all
other candidates, why they are none.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from rag.harvest import harvest

sys.path.append(str(Path(__file__).parents[1] / "test" / "rag"))
from planted_checkouts import NAMES, manifest, plant


def main() -> None:
    """One line per checkout, then all together."""
    found_all = complete_all = false_all = reasons_all = skipped_all = runnable = 0
    seconds = 0.0
    print("| checkout | complete pairs | found | false | other candidates | reason right |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            root, said = plant(name, Path(folder)), manifest(name)
            begun = time.process_time()
            report = harvest(root)
            seconds += time.process_time() - begun
            found = {f"{one.file}:{one.name}" for one in report.found}
            left = {f"{one.file}:{one.name}": one.reason.value for one in report.skipped}
            right = sum(left.get(candidate) == reason for candidate, reason in said.skipped.items())
            false = len(found - said.complete)
            hit = len(found & said.complete)
            print(f"| {name} | {len(said.complete)} | {hit} | {false} | {len(said.skipped)} | {right} |")
            complete_all, found_all, false_all = complete_all + len(said.complete), found_all + hit, false_all + false
            skipped_all, reasons_all = skipped_all + len(said.skipped), reasons_all + right
            runnable += sum(one.runnable for one in report.found)
    print(f"| **all** | {complete_all} | {found_all} | {false_all} | {skipped_all} | {reasons_all} |\n")
    print(
        f"{found_all / complete_all:.0%} of the complete pairs; {runnable} lack only SWEEP and make_args to be judged."
    )
    print(f"{seconds:.1f} s of processor time.")


if __name__ == "__main__":
    main()
