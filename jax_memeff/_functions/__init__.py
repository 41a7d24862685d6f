"""Users' functions of scores and masks: from a JAX function to a program, and its evaluation."""
