"""Print how well and how fast retrieval finds pairs for forwards in other authors' styles.

Run: python bench/rag.py > bench/rag.txt
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

if __name__ == "rag":
    # A script of this folder imports the package `rag`, and its own folder leads the path: hand over to the package.
    elsewhere = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    spec = importlib.machinery.PathFinder.find_spec("rag", elsewhere)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'rag'", name="rag")
    package = importlib.util.module_from_spec(spec)
    sys.modules["rag"] = package
    spec.loader.exec_module(package)

if __name__ == "__main__":
    from rag_figures import main

    main()
