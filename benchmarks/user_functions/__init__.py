"""The functions of scores and masks that cells name, in JAX and for FlexAttention."""
