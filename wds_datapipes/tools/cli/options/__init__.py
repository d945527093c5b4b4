"""Options that several commands have, and the values of options."""
