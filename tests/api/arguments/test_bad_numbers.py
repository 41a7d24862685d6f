"""Wrong scales, soft caps, dropout rates and keys raise errors that name them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import zeros
from test_bad_input import refuse

KEY = jax.random.key(0)
DROPOUT = {"dropout_rate": 0.5}

# As in test_bad_input.py.
CASES = {
    "nan_scale": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "time_scale": (
        {"scale": np.timedelta64(3, "s")},
        TypeError,
        "scale must be a number, got .*timedelta",
    ),
    "key_scale": ({"scale": jax.random.key(0)}, TypeError, "scale must be a number, got .*key"),
    "class_scale": (
        {"scale": np.float32},
        TypeError,
        "scale must be a number, got <class 'numpy.fl",
    ),
    "jax_class_soft_cap": (
        {"logits_soft_cap": jnp.float32},
        TypeError,
        "logits_soft_cap must be a number, got <class 'jax.numpy.float32'>",
    ),
    "shape_dropout_rate": (
        {"dropout_rate": jax.ShapeDtypeStruct((), "float32")},
        TypeError,
        "dropout_rate must be a number, got ShapeDtypeStruct",
    ),
    "infinite_scale": ({"scale": np.inf}, ValueError, "scale must be finite, got inf"),
    "text_scale": ({"scale": "big"}, TypeError, "scale must be a number, got 'big' of type str"),
    "boolean_scale": ({"scale": True}, TypeError, "scale must be a number, got True of type bool"),
    "numpy_boolean_scale": ({"scale": np.True_}, TypeError, "scale must be a number, got np.True_"),
    "complex_scale": ({"scale": 1j}, TypeError, "scale must be a number, got 1j of type complex"),
    "complex_array_scale": (
        {"scale": np.complex64(1j)},
        TypeError,
        "scale must be a number, got np.complex64",
    ),
    "scale_of_rank_1": (
        {"scale": np.array([0.5])},
        TypeError,
        r"scale must be one number, got an array of shape \(1,\)",
    ),
    "text_array_scale": ({"scale": np.array("0.5")}, TypeError, "scale must be a number, got arr"),
    "huge_integer_scale": ({"scale": 10**400}, ValueError, "scale must be finite, got an integer"),
    "large_scale": (
        {"scale": 1e39},
        ValueError,
        r"scale must be 0 or between 1.18e-38 and 8.51e\+37 in magnitude.*float32, got 1e\+39",
    ),
    "large_negative_scale": ({"scale": -1e38}, ValueError, r"scale must be 0 or.*got -1e\+38"),
    "denormal_scale": ({"scale": 1e-39}, ValueError, "scale must be 0 or between.*got 1e-39"),
    "least_scale": ({"scale": -5e-324}, ValueError, "scale must be 0 or between.*got -5e-324"),
    "large_soft_cap": (
        {"logits_soft_cap": 1e300},
        ValueError,
        r"logits_soft_cap must be between 1.18e-38 and 1.01e\+31, for scores in float32",
    ),
    "small_soft_cap": ({"logits_soft_cap": 1e-40}, ValueError, "logits_soft_cap must be between"),
    "soft_cap_of_a_large_scale": (
        {"logits_soft_cap": 1e-10, "scale": 1e30},
        ValueError,
        r"logits_soft_cap must be between 1.18e-08 and 1.01e\+31.*and scale 1e\+30, got 1e-10",
    ),
    "soft_cap_of_a_small_scale": (
        {"logits_soft_cap": 1e30, "scale": 1e-30},
        ValueError,
        r"logits_soft_cap must be between 1.18e-38 and 8.51e\+07.*scale 1e-30, got 1e\+30",
    ),
    "boolean_soft_cap": (
        {"logits_soft_cap": True},
        TypeError,
        "logits_soft_cap must be a number, got True",
    ),
    "boolean_rate": ({"dropout_rate": False}, TypeError, "dropout_rate must be a number, got Fals"),
    "soft_cap": ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be > 0, got 0.0"),
    "nan_soft_cap": ({"logits_soft_cap": np.nan}, ValueError, "logits_soft_cap must be finite"),
    "rate_1": ({"dropout_rate": 1.0}, ValueError, r"dropout_rate must be in \[0, 1\), got 1.0"),
    "negative_rate": ({"dropout_rate": -0.1}, ValueError, r"dropout_rate must be in.*got -0.1"),
    "small_rate": (
        {"dropout_rate": 1e-4, "dropout_key": KEY},
        ValueError,
        "dropout_rate.*0.0001.*nearest valid rates are 0.0 and 0.00390625",
    ),
    "large_rate": (
        {"dropout_rate": 0.9999, "dropout_key": KEY},
        ValueError,
        "dropout_rate.*0.9999.*nearest valid rate is 0.99609375",
    ),
    "no_key": (DROPOUT, ValueError, "dropout_key must be given when dropout_rate > 0.*got None"),
    "seed_as_key": (
        {**DROPOUT, "dropout_key": 3},
        TypeError,
        "dropout_key must be a jax.random key, got int",
    ),
    "float_key": (
        {**DROPOUT, "dropout_key": zeros(2)},
        TypeError,
        "dropout_key must be a key of jax.random.key.*got an array of dtype float32",
    ),
    "many_keys": (
        {**DROPOUT, "dropout_key": jax.random.split(KEY, 3)},
        ValueError,
        r"dropout_key must be one key, got an array of keys of shape \(3,\)",
    ),
    "many_legacy_keys": (
        {**DROPOUT, "dropout_key": zeros(3, 2, dtype=jnp.uint32)},
        ValueError,
        r"dropout_key must be one key, got an array of keys of shape \(3, 2\)",
    ),
    "key_of_three_words": (
        {**DROPOUT, "dropout_key": zeros(3, dtype=jnp.uint32)},
        ValueError,
        r"dropout_key must have shape \(2,\), as jax.random.PRNGKey makes them, got shape \(3,\)",
    ),
    "unused_text_key": (
        {"dropout_key": "abc"},
        TypeError,
        "dropout_key must be a jax.random key, got str",
    ),
    "unused_keys": (
        {"dropout_key": jax.random.split(KEY, 3)},
        ValueError,
        "dropout_key must be one key",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_bad_number(name):
    refuse(*CASES[name])
