"""What the commands of ``python -m jax_memeff`` print and do."""
