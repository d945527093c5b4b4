"""Reading services and their state: the only part of the package that knows torchdata."""
