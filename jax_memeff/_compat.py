"""Everything that depends on the version of JAX; no other module uses JAX's internals.

Modules that a call needs must not import ``jax.extend``. Since JAX 0.12 it imports Pallas, which
adds to JAX's configuration: if the first call of a process is traced by ``jax.jit``, JAX traces the
jitted function again when it is next called.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax._src import compiler, config, core, dispatch, source_info_util
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import JaxprEqn as JaxprEqn
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.core import Var as Var
from jax._src.core import jaxpr_as_fun as jaxpr_as_fun
from jax._src.interpreters.ad import JVPTrace, LinearizeTrace
from jax._src.interpreters.batching import BatchTrace
from jax._src.interpreters.mlir import TracebackCaches
from jax._src.mesh import empty_abstract_mesh, use_abstract_mesh
from jax._src.shard_map import ShardMapTrace
from jax._src.sharding_impls import ShardingContext
from jax.core import ShapedArray
from jax.experimental import hijax, jet
from jax.interpreters import mlir

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", Jaxpr)  # since JAX 0.11 they are one class

try:
    from jax._src.random.threefry2x32 import threefry_2x32 as threefry_2x32
except ImportError:  # JAX 0.10.0
    from jax._src.prng import (  # pyright: ignore[reportMissingImports]
        threefry_2x32 as threefry_2x32,
    )

InconclusiveDimensionOperation = core.InconclusiveDimensionOperation
"""The error for symbolic sizes that cannot be compared; its module differs between JAX versions."""

_CALLS = frozenset(
    {"checkpoint", "closed_call", "composite", "core_call", "eval_jaxpr", "jit", "pjit", "remat"}
    | {"remat2"}
)
_WITH_RULE = frozenset({"custom_jvp_call", "custom_vjp_call", "stop_gradient"})
_HIGH_LEVEL = "call_hi_primitive"
"""The primitive that calls functions such as ``jnp.searchsorted`` since JAX 0.12."""


def line_of(equation: JaxprEqn) -> str:
    """The line of the user's program from which an equation comes, if it is known."""
    return source_info_util.summarize(equation.source_info)


def is_call(equation: JaxprEqn) -> bool:
    """Whether an equation evaluates others, once and in all cases."""
    name = equation.primitive.name
    return name in _CALLS or name in _WITH_RULE or name == _HIGH_LEVEL


def body_of_call(call: JaxprEqn) -> ClosedJaxpr:
    """What a call computes from its operands."""
    if call.primitive.name == _HIGH_LEVEL:
        primitive: Any = call.primitive
        expanded = functools.partial(primitive.to_lojax, **call.params)
        return jax.make_jaxpr(expanded)(*(x.aval for x in call.invars))
    body: Any = call.params.get("jaxpr", call.params.get("call_jaxpr"))
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def may_have_rule(equation: JaxprEqn) -> bool:
    """Whether an equation is a call whose derivative may differ from that of its body."""
    if equation.primitive.name != _HIGH_LEVEL:
        return equation.primitive.name in _WITH_RULE

    def has_float(variables: Any) -> bool:
        dtypes = (variable.aval.dtype for variable in variables)
        return any(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in dtypes)

    return has_float(equation.invars) and has_float(equation.outvars)


def writes_backward(call: JaxprEqn) -> bool:
    """Whether the derivative of a call comes from a backward that somebody wrote. It may not be
    linear, unlike one that JAX derives from a tangent.
    """
    if call.primitive.name != _HIGH_LEVEL:
        return call.primitive.name == "custom_vjp_call"
    pairs = (getattr(hijax, name, None) for name in ("vjp_from_jvp", "vjp_from_lin"))
    derived = [backward for _, backward in filter(None, pairs)]
    return type(call.params["_prim"]).vjp_bwd_retval not in derived


def constants_and_carry(scan: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are the same in all steps, and how many are carried from step to
    step. The others are scanned.
    """
    if "ft_in" in scan.params:  # since JAX 0.11
        constants, carry, _ = scan.params["ft_in"].unpack()
        return len(constants), len(carry)
    return scan.params["num_consts"], scan.params["num_carry"]


without_tracing = core.eval_context
"""A context in which JAX computes with numbers at once, even inside a ``jax.shard_map`` outside of
``jax.jit``, whose results are tracers under ``jax.ensure_compile_time_eval``."""


def cast_to_common_varying_axes(tree: Any) -> Any:
    """Make every leaf vary over the manual mesh axes that any leaf varies over.

    Inside ``jax.shard_map`` all operands of a primitive must vary over the same axes. The cast
    comes before the differentiable call, so its transpose, a sum over devices, is outside the rule.
    """
    leaves, structure = jax.tree.flatten(tree)
    varying = list(map(varying_axes, leaves))
    common = frozenset().union(*varying)
    cast = [
        jax.lax.pcast(leaf, tuple(sorted(common - axes, key=str)), to="varying")
        if common - axes
        else leaf
        for leaf, axes in zip(leaves, varying, strict=True)
    ]
    return jax.tree.unflatten(structure, cast)


def widens_scatter(dtype: Any) -> bool:
    """Whether XLA for CPUs widens an array of this dtype to scatter into it, which copies it."""
    return dtype.name == "float8_e4m3fn" or (
        dtype.name == "bfloat16" and jax.__version_info__ < (0, 11)
    )


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which an array may differ from device to device."""
    return jax.typeof(x).manual_axis_type.varying


def compiled_in_eager_shard_map(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``function(operands, static)`` itself; wrapped in ``jax.jit`` in an eager shard_map.

    Outside of ``jax.jit``, JAX evaluates ``jax.shard_map`` op by op, and custom_vjp with symbolic
    zeros is not implemented there.
    """
    return _compiled(function) if _in_eager_shard_map() else function


@functools.cache
def _compiled(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    jitted = jax.jit(function, static_argnums=1)

    def call(operands: Any, static: Any) -> Any:
        with jax.disable_jit(False):
            return jitted(operands, static)

    return call


def _in_eager_shard_map() -> bool:
    """Whether the innermost of the enclosing ``jax.shard_map`` and ``jax.jit`` is the former."""
    trace = core.trace_ctx.trace
    while isinstance(trace, (JVPTrace, LinearizeTrace, BatchTrace)):
        trace = trace.parent_trace
    return isinstance(trace, ShardMapTrace)


def mapped_explicit_axes() -> frozenset[Any]:
    """The explicit mesh axes that shard a dim mapped by an enclosing ``jax.vmap``."""
    return getattr(core.get_axis_env(), "explicit_mesh_axis_names", frozenset())


def leading_dims(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result with the sharding of ``aval`` in its first three dims, for any fourth.

    Derived from ``aval`` rather than built, so varying axes and explicit shardings survive.
    """
    spec = [*aval.sharding.spec[:3], None][: len(shape)]
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def batched(aval: Any, shape: tuple[int, ...], like: Any) -> Any:
    """``aval`` in a shape that may differ in the first dim, which is then sharded as ``like``."""
    if aval.shape == shape:
        return aval.update(weak_type=False)
    spec = jax.sharding.PartitionSpec(like.sharding.spec[0], *aval.sharding.spec[1:])
    return aval.update(shape=shape, weak_type=False, sharding=aval.sharding.update(spec=spec))


def projection(aval: Any) -> Any:
    """The type [B, T, N, H] of one slot of an array [B, T, slots, N, H]."""
    spec = [*aval.sharding.spec[:2], *aval.sharding.spec[3:]]
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    return aval.update(shape=(*aval.shape[:2], *aval.shape[3:]), sharding=sharding)


def local(aval: Any) -> ShapedArray:
    """The type of the array without mesh axes.

    Lowering sees local arrays. In code that is traced there, JAX must not check over which mesh
    axes loop carries vary.
    """
    return ShapedArray(aval.shape, aval.dtype)


def compile_at_once(primitive: Primitive) -> None:
    """Let the primitive compile itself if it is called outside of ``jax.jit``.

    This includes ``jax.disable_jit()``, in which ``jax.jit(primitive.bind)`` would call itself.
    """
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))


def set_taylor_rule(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Set the rule of ``jax.experimental.jet``, which raises ``KeyError`` if there is none."""
    jet.jet_rules[primitive] = rule


def devices_of_compiler(ctx: mlir.LoweringRuleContext) -> int:
    """The number of devices among which XLA partitions the program being lowered.

    Inside ``jax.shard_map`` it is one.
    """
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program being lowered may run in another process."""
    return ctx.module_context.lowering_parameters.for_export


def with_device_assignment(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """A context in which JAX lowers custom_partitioning.

    It wants the devices of the program, although it only counts them. JAX gives them to primitives
    that are registered for this, and then lowers no program with one for an AbstractMesh, not even
    one whose calls are all inside ``jax.shard_map``.
    """
    devices = tuple(itertools.islice(itertools.cycle(jax.devices()), devices_of_compiler(ctx)))
    context = ShardingContext(len(devices), devices)
    module: Any = ctx.module_context
    return ctx.replace(module_context=module.replace(axis_context=context))


def devices_of_parts(sharding: Any, rank: int) -> np.ndarray | None:
    """The devices that have each part of an array, by their numbers in the program.

    Args:
        sharding: one that custom_partitioning did not decode.
        rank: the rank of the array.

    Returns:
        An array with the same dims, whose sizes are the numbers of parts, and another dim for the
        devices that have the same part; or None if this does not describe the sharding.
    """
    hlo = sharding._to_xla_hlo_sharding(rank)
    if sharding.is_fully_replicated:
        return np.arange(sharding.num_devices).reshape((1,) * rank + (-1,))
    if not hlo.is_tiled() or len(hlo.subgroup_types()) > 1:
        return None
    sizes = hlo.tile_assignment_dimensions()
    return np.reshape(hlo.tile_assignment_devices(), [*sizes[:rank], -1])


@contextlib.contextmanager
def located_here() -> Iterator[None]:
    """Operations that are traced in this context have the location where it is entered.

    Their own locations have ten frames, which do not reach the user's code.
    """
    holder = source_info_util._source_info_context
    before = holder.context
    holder.context = before.replace(traceback=source_info_util.current().traceback)
    try:
        yield
    finally:
        holder.context = before


def call_site() -> str:
    """The function of this package that the user called in the code being lowered, and where."""
    traceback = source_info_util.current().traceback
    called = "attention"
    for frame in traceback.frames if traceback else ():
        if not source_info_util.is_user_filename(frame.file_name):
            continue
        if not frame.file_name.startswith(_PACKAGE):
            return f"{called} at {frame.file_name}:{frame.line_num}"
        if "<locals>" not in frame.function_name:  # no wrapper
            called = frame.function_name
    return called


_PACKAGE = str(Path(__file__).parent)


def replace_compile_errors(handler: Callable[[Exception], Exception | None]) -> None:
    """Replace XLA compile errors with those that the handler returns, unless it returns None.

    XLA turns an exception raised in a Python callback into text inside an error of its own.
    """
    compiler.register_xla_runtime_error_handler(handler)


def located_at_this_call(partition: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of custom_partitioning whose programs have no stack frames of their own.

    XLA puts such a program into the module of the call, whose table of stack frames does not have
    those of the program. If the program refers to a frame beyond the end of the table, XLA's
    inliner may loop forever. So the program is one call of a function, with the location of the
    call that is being lowered, and the operations of the function have no location.

    The program does not belong to the mesh of ``jax.set_mesh`` either: it is traced while another
    program is compiled, and under explicit axes its operations would ask for shardings.
    """
    traceback = source_info_util.current().traceback

    @functools.wraps(partition)
    def located(*arguments: Any) -> tuple[Any, ...]:
        mesh, program, *shardings = partition(*arguments)

        def at_call(*operands: Any) -> Any:
            with source_info_util.user_context(traceback), use_abstract_mesh(empty_abstract_mesh):
                return _program.bind(*operands, jaxpr=jax.make_jaxpr(program)(*operands))

        return mesh, at_call, *shardings

    return located


_program = Primitive("program_of_device")
_program.multiple_results = True
_program.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)


def _without_frames(ctx: mlir.LoweringRuleContext, *values: Any, jaxpr: Any) -> Any:
    with config.traceback_in_locations_limit(0):
        caches = TracebackCaches()
    module: Any = ctx.module_context
    ctx = ctx.replace(module_context=module.replace(traceback_caches=caches))
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *values)


# JAX must not inline the function: since 0.11 its operations would get the location of the call.
mlir.register_lowering(_program, _without_frames, inline=False)
