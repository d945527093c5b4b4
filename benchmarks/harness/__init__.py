"""What all benchmarks share: the command line, contests, data, servers and the report."""
