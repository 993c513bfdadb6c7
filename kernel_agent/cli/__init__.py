"""The command line: parsing and rendering only, one file per group of commands."""
