"""Error handling of stages: raise, warn, skip, quarantine, or stop at a budget."""
