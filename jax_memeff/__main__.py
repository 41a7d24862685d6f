"""``python -m jax_memeff``."""

from jax_memeff.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
