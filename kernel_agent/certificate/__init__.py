"""What was proven about a backward, with what, and how to prove it again: one file that carries its own sources."""
