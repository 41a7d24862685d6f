"""The contexts of this package that change what JAX traces.

Hazard: making a context adds a setting to JAX, whose caches then miss whatever was traced before.
So ``import jax_memeff`` imports this module, and not the first call, which may be under
``jax.jit``: that function, and those compiled before, would be traced and compiled again.
"""

from __future__ import annotations

import jax

forward_mode = jax.make_user_context(False)
"""Whether calls have forward-mode derivatives: :func:`jax_memeff.forward_mode`."""

patched = jax.make_user_context(False)
"""Whether ``jax.nn`` is patched: :func:`jax_memeff.patch_jax_nn`. It is a part of the key of jit's
caches, so a function that was traced without the patch is traced again."""
