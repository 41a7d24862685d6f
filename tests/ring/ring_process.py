"""One process of a ring of processes: ``python ring_process.py ADDRESS PROCESSES INDEX PLATFORM``.

Each process has one device and compares its part of the results with the same part of a computation
on one device. The second program is a call under automatic axes, whose key ids are sharded like its
rows. The last line on stdout is JSON: the largest relative error of an array.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ring_case import case, normal, ordered, segment_ids
from several_devices import Devices, sizes

from jax_memeff import Mask, dot_product_attention

LAYOUT = "zigzag"


def errors(
    got: jax.Array, want: jax.Array, axis: int, devices: Devices, layout: str = LAYOUT
) -> list[float]:
    """The relative errors, in the Frobenius norm, of the parts of a result in this process.

    Args:
        axis: the sequence dim of both.
    """
    expected = ordered(layout, np.asarray(want, np.float64), axis, devices)
    found = []
    for shard in got.addressable_shards:
        ours, theirs = np.asarray(shard.data, np.float64), expected[shard.index]
        finite = np.isfinite(theirs)
        np.testing.assert_array_equal(ours[~finite], theirs[~finite])
        difference = np.linalg.norm(ours[finite] - theirs[finite])
        found.append(float(difference / np.linalg.norm(theirs[finite])))
    return found


def of_automatic_axes(devices: Devices) -> list[float]:
    """The relative errors of a call whose rows are sharded by the compiler."""
    given = sizes(devices)
    shape = (2, 128 * given.scale, 4, given.head_dim)
    query, key, value = (normal(seed, *shape, dtype=given.dtype) for seed in range(3))
    ids = segment_ids(0, given.scale)

    def attend(query, key, value, ids):
        mask = Mask.segments(ids, ids)
        return dot_product_attention(query, key, value, mask=mask, is_causal=True)

    def call(query, *others):
        return attend(jax.lax.with_sharding_constraint(query, P(None, "ring")), *others)

    want = jax.jit(attend)(query, key, value, ids)
    mesh = jax.make_mesh((len(devices),), ("ring",), axis_types=(AxisType.Auto,), devices=devices)
    with jax.set_mesh(mesh):
        got = jax.jit(call)(*map(np.asarray, (query, key, value)), ids)
    return errors(got, want, 1, devices, "contiguous")


def main(address: str, processes: str, index: str, platform: str) -> None:
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        address,
        int(processes),
        int(index),
        local_device_ids=[int(index)] if platform == "cuda" else None,
    )
    devices = jax.devices(platform)
    assert len(devices) == int(processes) and len(jax.local_devices(backend=platform)) == 1
    problem = case("everything", sizes(devices))
    (results, bias_gradient), (wanted, wanted_bias) = problem.run(devices, LAYOUT), problem.want
    found = errors(bias_gradient, wanted_bias, 2, devices)
    for got, want in zip(results, wanted, strict=True):
        found += errors(got, want, 1, devices)
    found += of_automatic_axes(devices)
    print(json.dumps({"devices": len(devices), "arrays": len(found), "error": max(found)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
