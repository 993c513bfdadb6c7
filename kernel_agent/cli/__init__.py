"""The command line: parsing and rendering only."""
