"""What is wrong with a red candidate, where, and which of its lines does it: never a guess, only what was fitted."""
