"""The dropout of a call: the rate after rounding, and the random bits."""

from jax_memeff._call.dropout import keep_mask as keep_mask
from jax_memeff._call.dropout import realised_rate as realised_rate
from jax_memeff._call.dropout import state as state
from jax_memeff._call.dropout import threshold as threshold
