"""Runs the command line as ``python -m wds_datapipes``."""

from wds_datapipes.tools.cli import main

main()
