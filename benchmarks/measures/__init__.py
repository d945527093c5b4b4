"""The measurements of questions that are too long for a program."""
