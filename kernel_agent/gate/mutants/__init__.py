"""Mutants of a backward: the gate's proof, on this very file, that it would have seen a mistake."""
