"""The cells that are timed, their inputs, and the programs of each peer."""
