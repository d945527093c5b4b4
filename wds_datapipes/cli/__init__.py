"""The command line ``wds-datapipes``: each command is a function, whose docstring is its help.

To add a command, write a function, as `_declaration` describes, and add it to `COMMANDS`. As importing the package
imports torch, every command takes as long to start as torch does.
"""

from wds_datapipes.cli._app import COMMANDS, main

__all__ = ["COMMANDS", "main"]
