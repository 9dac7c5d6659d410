"""Rows of tokens brought together by expert, and their results brought back.

Dropless: the blocks suffice for any routing. Each expert's rows fill whole blocks, the last one padded with zeros, so
at most `(t k + e (c - 1)) / c` blocks are in use. Both directions are gathers by a permutation and its inverse, so the
backward pass needs no scatter.

Dims: t tokens, k experts a token, e experts, n blocks, c rows a block, d size of a row.
"""

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class Plan(NamedTuple):
    """Where each choice goes. A choice is a pair (token, one of its k experts), numbered `token * k + which`."""

    row_of_choice: Int32[Array, "t k"]
    choice_of_row: Int32[Array, " n_times_c"]  # t k, out of range, for rows of padding
    experts: Int32[Array, " n"]


@runtime_checkable
class Dispatch(Protocol):
    """What an `Experts` layer calls to move tokens to experts and back; a sharded one exchanges them over devices."""

    def plan(self, chosen: Int32[Array, "t k"], num_experts: int) -> Plan: ...
    def send(self, x: Float[Array, "t d"], plan: Plan) -> Float[Array, "n c d"]: ...
    def receive(self, rows: Float[Array, "n c d"], weights: Float[Array, "t k"], plan: Plan) -> Float[Array, "t d"]: ...


class LocalDispatch(NamedTuple):
    """All experts on one device, in blocks of about half an expert's mean load, 8 to `largest_block` rows."""

    largest_block: int = 128

    def plan(self, chosen: Int32[Array, "t k"], num_experts: int) -> Plan:
        """Sorts the choices by expert, stably, and lays each expert's run out from the start of a block."""
        flat = chosen.reshape(-1)
        block = self._block(flat.size, num_experts)
        num_blocks = (flat.size + num_experts * (block - 1)) // block
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1)
        first_choice = jnp.cumsum(counts, dtype=jnp.int32) - counts
        blocks = (counts + block - 1) // block
        last_block = jnp.cumsum(blocks, dtype=jnp.int32)
        first_row = block * (last_block - blocks)

        rank = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=jnp.int32)) - first_choice[flat]
        row_of_choice = first_row[flat] + rank
        begun = jnp.arange(num_blocks, dtype=jnp.int32)[:, None] >= last_block[None]
        experts = jnp.minimum(jnp.sum(begun, axis=1, dtype=jnp.int32), num_experts - 1)
        expert_of_row = jnp.repeat(experts, block)
        place = jnp.arange(num_blocks * block, dtype=jnp.int32) - first_row[expert_of_row]
        choice = order.at[first_choice[expert_of_row] + place].get(mode="fill", fill_value=flat.size)
        choice_of_row = jnp.where(place < counts[expert_of_row], choice, flat.size)
        return Plan(row_of_choice.reshape(chosen.shape), choice_of_row, experts)

    def send(self, x: Float[Array, "t d"], plan: Plan) -> Float[Array, "n c d"]:
        return _send(x, plan).reshape(plan.experts.size, -1, x.shape[-1])

    def receive(self, rows: Float[Array, "n c d"], weights: Float[Array, "t k"], plan: Plan) -> Float[Array, "t d"]:
        """Sum over each token's experts of weight times row."""
        return _receive(rows.reshape(-1, rows.shape[-1]), weights, plan)

    def _block(self, choices: int, num_experts: int) -> int:
        block = 8
        while block < self.largest_block and 4 * block <= choices // num_experts:
            block *= 2
        return block


_take = partial(jnp.take, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _send(x, plan: Plan):
    return _take(x, plan.choice_of_row // plan.row_of_choice.shape[1])


def _send_backward(plan: Plan, slope):
    return jnp.sum(_take(slope, plan.row_of_choice), axis=1), None


_send.defvjp(lambda x, plan: (_send(x, plan), plan), _send_backward)


@jax.custom_vjp
def _receive(rows, weights, plan: Plan):
    return jnp.einsum("tk,tkd->td", weights.astype(rows.dtype), _take(rows, plan.row_of_choice))


def _receive_backward(residuals, slope):
    rows, weights, plan = residuals
    d_weights = jnp.einsum("td,tkd->tk", slope, _take(rows, plan.row_of_choice), preferred_element_type=jnp.float32)
    weight_of_row = _take(weights.reshape(-1), plan.choice_of_row).astype(rows.dtype)
    slope_of_row = _take(slope, plan.choice_of_row // weights.shape[1])
    return weight_of_row[:, None] * slope_of_row, d_weights.astype(weights.dtype), None


_receive.defvjp(lambda rows, weights, plan: (_receive(rows, weights, plan), (rows, weights, plan)), _receive_backward)
