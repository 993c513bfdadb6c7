"""Snapshots keep candidates by content and notice when one was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.agent.snapshots import Snapshots
from kernel_agent.errors import InputError
from kernel_agent.pairs.spec import Candidate

BACKWARD = "def backward(saved, g):\n    return g\n"
CANDIDATES = [
    Candidate(backward=BACKWARD),
    Candidate(backward=BACKWARD, forward="def forward(x):\n    return x, ()\n"),
    Candidate(backward="\n\n" + BACKWARD + "\n\n", forward=""),
]


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_a_candidate_comes_back_by_its_digest(tmp_path: Path, candidate: Candidate) -> None:
    snapshots = Snapshots(tmp_path)
    found = snapshots.get(snapshots.put(candidate))
    assert found.backward.strip("\n") == candidate.backward.strip("\n")
    assert (found.forward or "") == (candidate.forward or "")


def test_the_same_candidate_is_stored_once(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    assert snapshots.put(CANDIDATES[0]) == snapshots.put(Candidate(backward=BACKWARD + "\n"))
    assert len(list(tmp_path.iterdir())) == 1


def test_an_edited_snapshot_is_refused(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    digest = snapshots.put(CANDIDATES[0])
    snapshots.path(digest).write_text("# --- backward ---\ndef backward(saved, g):\n    return 2 * g\n")
    with pytest.raises(InputError, match="edited"):
        snapshots.get(digest)


def test_a_missing_snapshot_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing"):
        Snapshots(tmp_path).get("0" * 64)


def test_what_a_candidate_declares_comes_back_with_it(tmp_path: Path) -> None:
    # A derived backward may call torch functions that the pair does not; without their names the gate refuses them.
    snapshots = Snapshots(tmp_path)
    declaring = Candidate(forward="def forward(): ...\n", backward="def backward(): ...\n", torch_ops=("a", "b"))
    assert snapshots.get(snapshots.put(declaring)) == declaring


def test_a_marker_within_a_line_of_the_forward_does_not_move_the_border(tmp_path: Path) -> None:
    # A comment that ends like the marker would cut the forward there, and the run would stop at an "edited" snapshot.
    snapshots = Snapshots(tmp_path)
    forward = "def forward(x):\n    return x, (x,)  # --- backward ---\n"
    candidate = Candidate(backward=BACKWARD, forward=forward)
    assert snapshots.get(snapshots.put(candidate)) == candidate
