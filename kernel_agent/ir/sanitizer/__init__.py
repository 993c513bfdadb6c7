"""Judges every access of every launch: bounds, races, memory that nothing wrote, offsets that wrap."""
