"""The work of the command line: create, convert, verify, count, sort, shuffle and show datasets."""
