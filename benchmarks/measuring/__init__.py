"""How programs are timed, and the documents that keep the results."""
