"""What a stage does with an error: raise, warn, skip, quarantine, or stop at a budget."""
