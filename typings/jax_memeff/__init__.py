"""Seen by pyright only, which looks for jax_memeff.codegen here; see pyproject.toml."""
