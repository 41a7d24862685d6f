"""What a user may ask about dropout: the rate that a call gets, and the bits it draws."""

from jax_memeff._call.dropout import keep_mask as keep_mask
from jax_memeff._call.dropout import realised_rate as realised_rate
from jax_memeff._call.dropout import state as state
from jax_memeff._call.dropout import threshold as threshold
