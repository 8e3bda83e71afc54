"""Number formats by their names in the configuration."""

import jax.numpy as jnp

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}
