"""The command line ``wds-datapipes``: each command is a function whose docstring is its help.

To add a command, write a function as `_declaration` describes and add it to `COMMANDS`. Importing the package imports
torch, so every command takes at least as long to start as torch.
"""

from wds_datapipes.cli._app import COMMANDS, main

__all__ = ["COMMANDS", "main"]
