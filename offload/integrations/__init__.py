"""One file a neighbour; each imports its neighbour when it is called."""
