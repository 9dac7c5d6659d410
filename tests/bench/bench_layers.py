"""Forward and backward pass of single layers on the device at hand: experts, and attention by length.

`make bench` prints the figures of all files here; nothing fails on time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from layers import Experts, Tag, local_attend

KEY = jax.random.key(0)
TOKENS, EXPERTS, PER_TOKEN, DIM, HIDDEN = 8192, 16, 2, 256, 256
CONTEXT, LSE = Tag("context", Float[Array, "..."]), Tag("lse", Float[Array, "..."])


def gradient(function: Any, *args: Any) -> Any:
    """A call that computes the gradient of the sum of squares, compiled already."""
    step = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.square(function(*args))), argnums=tuple(range(len(args)))))
    jax.block_until_ready(step(*args))
    return lambda: jax.block_until_ready(step(*args))


@pytest.mark.benchmark(group="8,192 tokens through 2 of 16 experts, width 256")
def bench_experts(benchmark: Any):
    experts = Experts(DIM, HIDDEN, EXPERTS, key=KEY)
    chosen = jnp.asarray(np.arange(TOKENS * PER_TOKEN, dtype=np.int32).reshape(TOKENS, PER_TOKEN) % EXPERTS)
    weights = jnp.full((TOKENS, PER_TOKEN), 1 / PER_TOKEN)
    call = gradient(lambda experts, x: experts(x, weights, chosen)[0], experts, jax.random.normal(KEY, (TOKENS, DIM)))
    benchmark(call)


@pytest.mark.benchmark(group="8,192 tokens through 2 of 16 experts, width 256")
def bench_einsum_of_the_same_products(benchmark: Any):
    experts = Experts(DIM, HIDDEN, EXPERTS, key=KEY)

    def batched(experts: Any, rows: Any) -> Any:
        gate, up = (jnp.einsum("ecd,edf->ecf", rows, part) for part in (experts.gate_proj, experts.up_proj))
        return jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, experts.down_proj)

    rows = jax.random.normal(KEY, (EXPERTS, TOKENS * PER_TOKEN // EXPERTS, DIM))
    benchmark(gradient(batched, experts, rows))


@pytest.mark.benchmark(group="attention, 2 query heads a key-value head, head size 64")
@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192, 16384])
def bench_attention(benchmark: Any, length: int):
    query, key, value = (jax.random.normal(KEY, (1, length, heads, 64)) for heads in (4, 2, 2))

    def attend(query: Any, key: Any, value: Any) -> Any:
        return local_attend(query, key, value, scale=0.125, context=CONTEXT, lse=LSE)

    benchmark.pedantic(gradient(attend, query, key, value), rounds=3)
