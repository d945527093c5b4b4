"""The loaders that are compared, and the program that measures one."""
