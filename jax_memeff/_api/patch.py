"""``patch_jax_nn``: this library for programs that call ``jax.nn.dot_product_attention``."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_memeff._api import attention
from jax_memeff._api.arrays import FLOATS
from jax_memeff._call import scaling
from jax_memeff._call.values import held, score_dtype
from jax_memeff._op import contexts

_LOGGER = logging.getLogger("jax_memeff")

_TAKEN = {
    *("query", "key", "value", "bias", "mask", "scale", "is_causal", "query_seq_lengths"),
    *("key_value_seq_lengths", "local_window_size", "implementation", "return_residual"),
}
"""The arguments of ``jax.nn.dot_product_attention`` that this library has too."""

_IGNORED_IMPLEMENTATIONS = ("xla", "cudnn")

# A signal handler may open or end a patch while its thread does the same.
_lock = threading.RLock()
_open: list[JaxNNPatch] = []
_installed: _Installed | None = None
_said: set[tuple[str, int, str]] = set()


class _Installed(NamedTuple):
    wrapper: Callable[..., Any]
    original: Callable[..., Any]


class JaxNNPatch:
    """An open patch of ``jax.nn``; ``undo()`` or the end of a ``with`` block ends it."""

    _is_entered = False

    def undo(self) -> None:
        """End this patch. A second call does nothing.

        ``jax.nn`` gets its own function back when all patches have ended, in any order.
        """
        with _lock:
            if self not in _open:
                return
            _open.remove(self)
            if not _open:
                _uninstall()

    def __enter__(self) -> JaxNNPatch:
        """Raises ``RuntimeError`` if the patch has ended, or if it already has a ``with`` block."""
        with _lock:
            if self._is_entered or self not in _open:
                state = "already has a with block" if self in _open else "has ended"
                raise RuntimeError(
                    f"expected an open patch without a with block, but this one {state}; open a "
                    "new patch for each block: `with jax_memeff.patch_jax_nn():`"
                )
            self._is_entered = True
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ``TypeError``, and ends the patch, to which nothing else may refer."""
        self.undo()
        raise TypeError(
            "patch_jax_nn() is not a decorator, got a call; write `with "
            "jax_memeff.patch_jax_nn():` inside the function"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def patch_jax_nn() -> JaxNNPatch:
    """Replace ``jax.nn.dot_product_attention`` with this library's, for libraries that call it.

    Keras, Flax's nnx and others call ``jax.nn`` themselves. After this call they run on
    :func:`jax_memeff.dot_product_attention`, in every thread of the process, until ``undo()`` or
    the end of the ``with`` block. Patches may be nested: the last one to end restores ``jax.nn``.
    ``jax.jit`` retraces functions that it traced without the patch.

    - ``implementation`` ``None``, ``"xla"`` and ``"cudnn"`` all become ``None``: the kernels on
      CUDA, the blockwise path elsewhere. Callers mean one of jax.nn's two implementations, neither
      of which runs now, and libraries often choose without asking the user. To force the blockwise
      path, call :func:`jax_memeff.dot_product_attention` with ``"xla"``.
    - float64 runs on the blockwise path everywhere, because no kernel supports it.
    - jax.nn still serves the calls that only it supports: a ``scale`` that is not one finite real
      number, a window that is traced or negative, dtypes that this library lacks, and
      arguments that a later jax may add.
    - The residual is that of jax.nn: in query's dtype, without a gradient.
    - Everything else is as in :func:`jax_memeff.dot_product_attention`: a row that may attend to
      nothing gives 0, with -inf as residual, forward mode needs
      :func:`jax_memeff.forward_mode`, and shardings that would gather operands raise.

    The logger ``jax_memeff`` reports each call site once, as a warning so that it is visible by
    default: whether this library took the call, or why it left it to jax.nn.

    Code that already holds the original function is unaffected: a module that ran
    ``from jax.nn import dot_product_attention``, or a default argument that was evaluated, before
    the patch. Patch first, and import such modules afterwards.

    Returns:
        The open patch: an object with ``undo()``, and a context manager.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> query = jnp.ones((1, 16, 2, 8))
    >>> def program(query):
    ...     return jax.nn.dot_product_attention(query, query, query, implementation="cudnn")
    >>> with jax_memeff.patch_jax_nn():
    ...     "attention_fwd" in str(jax.make_jaxpr(program)(query))
    True
    """
    patch = JaxNNPatch()
    with _lock:
        _open.append(patch)
        if _installed is None:
            _install()
    return patch


def _install() -> None:
    global _installed
    original = jax.nn.dot_product_attention
    made = _Installed(_wrapper(original), original)
    if _installed is None:  # a signal handler may have done it meanwhile
        _installed = made
        jax.nn.dot_product_attention = made.wrapper
        contexts.patched.set_global(True)


def _uninstall() -> None:
    global _installed
    contexts.patched.set_global(False)
    _said.clear()
    # If other code has replaced the function since, its replacement stays. It calls our wrapper,
    # which passes every call on to jax.nn from now on.
    installed = _installed  # a signal handler may change the global
    if installed is not None and jax.nn.dot_product_attention is installed.wrapper:
        jax.nn.dot_product_attention = installed.original
    _installed = None


def _wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        # Modules may have imported this function while the patch was open.
        if not contexts.patched.value:
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        arguments = {name: held(x) for name, x in call.arguments.items()}
        reason = _only_jax_nn(signature, arguments)
        if reason is not None:
            _say(f"runs on jax.nn, because {reason}")
            return original(*args, **kwargs)
        implementation = arguments.get("implementation")
        ignored = implementation in _IGNORED_IMPLEMENTATIONS
        detail = f", which ignores implementation={implementation!r}" if ignored else ""
        _say(f"runs on jax_memeff{detail}")
        return _attention(**{name: x for name, x in arguments.items() if name in _TAKEN})

    return dot_product_attention


def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: Any = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Any = None,
    return_residual: Any = False,
) -> Any:
    """This library's function with the arguments of jax.nn.

    Each array of a rank below 4 gets leading dims of size 1 independently, as in jax.nn.
    """
    shape = jnp.shape(query)
    query, key, value, bias, mask = map(_rank_4, (query, key, value, bias, mask))
    if bias is not None and bias.dtype not in (query.dtype, jnp.float32):
        bias = bias.astype(score_dtype(query.dtype))
    # Lengths that exceed the array are clamped if they are device arrays. NumPy arrays would raise,
    # and they do not in jax.nn.
    query_lengths, key_lengths = (
        None if x is None else jnp.asarray(x) for x in (query_seq_lengths, key_value_seq_lengths)
    )
    if implementation in _IGNORED_IMPLEMENTATIONS:
        implementation = None
    if implementation is None and query.dtype == jnp.float64:
        implementation = "xla"
    out, residual = attention.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=bool(is_causal),
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        return_residual=True,
    )
    out = out.reshape(*shape[:-1], out.shape[-1])
    if not return_residual:
        return out
    # Programs carry jax.nn's residual in loops, which need its dtype, and it has no gradient there.
    residual = jax.lax.stop_gradient(residual).astype(query.dtype)
    return out, residual.reshape(shape[:-1])


def _rank_4(x: Any) -> Any:
    if x is None:
        return None
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _only_jax_nn(signature: inspect.Signature, arguments: Mapping[str, Any]) -> str | None:
    """The reason why only jax.nn may support a call; None if this library takes it."""
    for name, value in arguments.items():
        if name not in _TAKEN and value is not signature.parameters[name].default:
            return f"only jax.nn has the argument {name}"
    dtypes = {name: jnp.asarray(arguments[name]).dtype for name in ("query", "key", "value")}
    for name, dtype in dtypes.items():
        if dtype.name not in FLOATS:
            return f"{name} has dtype {dtype}"
    scale = arguments.get("scale")
    if scale is not None and not _is_usual_scale(scale, dtypes["query"]):
        return "scale is not one finite real number of usual size"
    window = arguments.get("local_window_size")
    sides = window if isinstance(window, (tuple, list)) else (window,)
    if any(isinstance(side, Tracer) for side in sides):
        return "local_window_size is traced"
    if any(side is not None and jnp.ndim(side) > 0 for side in sides):
        return "local_window_size is an array"
    if any(side is not None and side < 0 for side in sides):
        return f"local_window_size is {window}, and a side is negative"
    return None


def _is_usual_scale(scale: Any, dtype: Any) -> bool:
    """Whether the scale is one real number that this library takes for a query of ``dtype``. The
    value of a traced one is unknown.
    """
    if jnp.ndim(scale) > 0 or jnp.iscomplexobj(scale):
        return False
    return isinstance(scale, Tracer) or scaling.is_in_range(float(scale), dtype)


def _say(what: str) -> None:
    """Log ``what`` once for each line of the callers' code."""
    frame = sys._getframe(2)
    # Skip jax.vmap and other transformations, to name the code that uses them.
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("jax."):
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno, what)
    with _lock:
        if place in _said:
            return
        _said.add(place)
    caller = f"{frame.f_globals.get('__name__')}, line {frame.f_lineno}"
    _LOGGER.warning("jax.nn.dot_product_attention of %s: %s", caller, what)
