"""The gate: the one judge of every backward, whoever wrote it."""
