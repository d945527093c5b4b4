"""Reading tar archives: headers, members, and the headers that writers need."""
