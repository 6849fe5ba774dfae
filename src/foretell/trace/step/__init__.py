"""One step of one rank, from its events to the columns of a graph."""
