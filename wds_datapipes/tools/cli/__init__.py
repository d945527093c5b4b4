"""The command line ``wds-datapipes``: each command is a function whose docstring is its help.

To add a command, write a function as `docstring_options` describes and add it to `COMMANDS`. Importing the package
imports torch, so every command takes at least as long to start as torch.
"""

from wds_datapipes.tools.cli.program import COMMANDS, main

__all__ = ["COMMANDS", "main"]
