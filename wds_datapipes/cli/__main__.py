"""Runs the command line as ``python -m wds_datapipes.cli``."""

from wds_datapipes.cli import main

main()
