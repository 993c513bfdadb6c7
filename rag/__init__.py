"""Retrieval of the nearest proven pairs for a forward kernel."""
