"""``python -m jax_memeff verify``: the library's own cases on the user's GPU."""
