"""The logic, as plain generator functions and small classes over the standard library and numpy.

Nothing here imports torch or torchdata when it is imported, registers anything or looks at the environment, so that
another front end can be built on it. A test holds this floor to that.
"""
