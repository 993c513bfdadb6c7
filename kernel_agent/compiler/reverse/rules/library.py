"""Functions of the libraries: to come."""
