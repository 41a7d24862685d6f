"""``python -m jax_memeff bench``: the user's call on this machine, compared with ``jax.nn``."""
