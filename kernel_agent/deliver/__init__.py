"""The finished operator, its test, its benchmark and its certificate."""
