"""Shardings of the compiler, as axes of a mesh that is made of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_memeff import _compat as compat
from jax_memeff._sharding.mesh_axes import DeviceAxes, Stride, strides_of_dims

MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (3, 2), (6,), (1, 4, 2), (7,)]


def strides_of(sharding, rank):
    devices = compat.devices_of_parts(sharding, rank)
    assert devices is not None
    return strides_of_dims(devices, rank)


@pytest.mark.quick
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_sharding_over_whole_axes_has_a_spec(shape):
    """The same devices have the same parts, for all ways to shard two of three dims."""
    names = "abc"[: len(shape)]
    mesh = AbstractMesh(shape, tuple(names))
    for order in itertools.permutations(names):
        for first, second in itertools.combinations_with_replacement(range(len(names) + 1), 2):
            given = NamedSharding(mesh, P(order[:first], None, order[first:second]))
            strides = strides_of(given, 3)
            axes = DeviceAxes((1, mesh.size), mesh.shape)
            for stride in itertools.chain.from_iterable(strides or ()):
                axes = axes.cut_at(stride.stride, stride.end)
            spec = axes.spec(strides)
            assert spec is not None
            found = NamedSharding(axes.mesh, spec)
            assert found._to_xla_hlo_sharding(3) == given._to_xla_hlo_sharding(3)


def test_devices_at_irregular_distances_are_no_strides():
    assert strides_of_dims(np.array([[0, 1, 3, 2]]), 1) == [[]]  # four copies, in any order
    assert strides_of_dims(np.array([0, 1, 3, 2])[:, None], 1) is None
    assert strides_of_dims(np.array([1, 0])[:, None], 1) is None
    assert strides_of_dims(np.array([[0, 1], [3, 2]]), 2) is None


def test_axes_that_cross_have_no_spec():
    axes = DeviceAxes((1, 6), {}).cut_at(3).cut_at(2)
    assert list(axes.sizes.values()) == [2, 3]
    assert axes.spec([[Stride(3, 2)]]) is None
    assert axes.spec([[Stride(2, 3)], []]) == P(("stride3",), ())


def test_messages_name_the_axes_of_the_user():
    axes = DeviceAxes((1, 2, 4, 8), {"data": 4, "model": 2})
    assert axes.text(("stride4", "stride2")) == "mesh axis 'data'"
    assert axes.text(("stride4",)) == "part of mesh axis 'data'"
    assert axes.text(("stride2", "stride1")) == "mesh axes (part of 'data', 'model')"
    assert axes.text(()) == "no mesh axis"
    assert "to P(None, 'model') by" in axes.remedy(P(None, "stride1"))
    assert "to P(('data', 'model'),) by" in axes.remedy(P(("stride4", "stride2", "stride1")))
    assert "to whole mesh axes by" in axes.remedy(P("stride4"))
    unknown = DeviceAxes((1, 2, 8), {})
    assert unknown.text(("stride2",)) == "mesh axes of 4 devices"
    assert "to whole mesh axes by" in unknown.remedy(P("stride2"))
