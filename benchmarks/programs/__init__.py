"""What is timed: cells, their inputs, and the programs of each peer."""
