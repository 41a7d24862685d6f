"""The commands of ``python -m jax_memeff``."""
