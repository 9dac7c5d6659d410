"""Rows of tokens brought together by expert, and their results brought back.

Each expert's rows fill whole blocks, the last one padded with zeros, so at most `(t k + e (c - 1)) / c` blocks are in
use. Both directions are gathers by a permutation and its inverse, so the backward pass needs no scatter.

Dims: t tokens, k experts a token, e experts, n blocks, c rows a block, d size of a row.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class Plan(NamedTuple):
    """Where each choice goes. A choice is a pair (token, one of its k experts), numbered `token * k + which`."""

    row_of_choice: Int32[Array, "t k"]  # n c, out of range, for a choice that is dropped
    choice_of_row: Int32[Array, "*n_and_c"]  # t k, out of range, for rows of padding; rows are sent in these dims
    experts: Int32[Array, " n"]  # the expert of each block; an expert's blocks follow one another

    @property
    def dropped(self) -> Int32[Array, ""]:
        """How many choices are dropped."""
        return jnp.sum(self.row_of_choice >= self.choice_of_row.size, dtype=jnp.int32)


@runtime_checkable
class Dispatch(Protocol):
    """What an `Experts` layer calls to move tokens to experts and back; a sharded one exchanges them over devices.

    `run(compute, projections, x, weights, chosen)` gives `compute(projections, x, weights, chosen)`, which calls the
    others: on each device for its own tokens, if there are several.
    """

    def run(self, compute: Callable[..., Any], projections: Any, *tokens: Array) -> Any: ...
    def plan(self, chosen: Int32[Array, "t k"], num_experts: int) -> Plan: ...
    def send(
        self, x: Float[Array, "t d"], weights: Float[Array, "t k"], plan: Plan
    ) -> tuple[Float[Array, "n c d"], Float[Array, "n c"]]: ...
    def receive(self, rows: Float[Array, "n c d"], plan: Plan) -> Float[Array, "t d"]: ...


class LocalDispatch(NamedTuple):
    """All experts on one device, in blocks of about half an expert's mean load, 8 to `largest_block` rows.

    No token is ever dropped: the blocks suffice for any routing.
    """

    largest_block: int = 128

    def run(self, compute: Callable[..., Any], projections: Any, *tokens: Array) -> Any:
        return compute(projections, *tokens)

    def plan(self, chosen: Int32[Array, "t k"], num_experts: int) -> Plan:
        """Each expert's rows start a block of their own; the last one is padded."""
        block = self._block(chosen.size, num_experts)
        num_blocks = (chosen.size + num_experts * (block - 1)) // block
        order = _Order.of(chosen, num_experts)
        blocks = ((order.counts + block - 1).astype(jnp.uint32) // block).astype(jnp.int32)
        last_block = jnp.cumsum(blocks, dtype=jnp.int32)
        begun = jnp.arange(num_blocks, dtype=jnp.int32)[:, None] >= last_block[None]
        experts = jnp.minimum(jnp.sum(begun, axis=1, dtype=jnp.int32), num_experts - 1)
        return order.plan(block * (last_block - blocks), order.counts, experts, block)

    def send(
        self, x: Float[Array, "t d"], weights: Float[Array, "t k"], plan: Plan
    ) -> tuple[Float[Array, "*n_and_c d"], Float[Array, "*n_and_c"]]:
        """The rows of the tokens in the order of the plan, zeros for padding, and each row's weight."""
        return _send(x, plan), _send_weights(weights, plan)

    def receive(self, rows: Float[Array, "*n_and_c d"], plan: Plan) -> Float[Array, "t d"]:
        """The sum of each token's rows."""
        return _receive(rows, plan)

    def _block(self, choices: int, num_experts: int) -> int:
        block = 8
        while block < self.largest_block and 4 * block <= choices // num_experts:
            block *= 2
        return block


class CapacityDispatch(NamedTuple):
    """One block an expert, of `factor` times the mean load; choices beyond it are dropped, later tokens first.

    A dropped choice adds nothing to its token; the weights of the others stay. Source: GShard, arXiv 2006.16668,
    algorithm 1; with a factor of `num_experts / k` or more nothing is dropped.
    """

    factor: float

    def plan(self, chosen: Int32[Array, "t k"], num_experts: int) -> Plan:
        capacity = math.ceil(min(self.factor / num_experts, 1.0) * chosen.size)
        order = _Order.of(chosen, num_experts)
        experts = jnp.arange(num_experts, dtype=jnp.int32)
        return order.plan(capacity * experts, jnp.minimum(order.counts, capacity), experts, capacity)

    run = LocalDispatch.run
    send = LocalDispatch.send
    receive = LocalDispatch.receive


def count(choices: Int32[Array, " n"], num_experts: int) -> Int32[Array, " e"]:
    """How many choices fall on each expert: a sum of comparisons, which one kernel takes without a scatter."""
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.sum(choices[:, None] == experts[None], axis=0, dtype=jnp.int32)


class _Order(NamedTuple):
    """The choices sorted by expert, stably."""

    chosen: Int32[Array, "t k"]
    choices: Int32[Array, " t_times_k"]  # in the order of their experts
    experts: Int32[Array, " t_times_k"]  # of these choices
    counts: Int32[Array, " e"]

    @classmethod
    def of(cls, chosen: Int32[Array, "t k"], num_experts: int) -> "_Order":
        flat = chosen.reshape(-1)
        experts, choices = jax.lax.sort_key_val(flat, jnp.arange(flat.size, dtype=jnp.int32), is_stable=True)
        return cls(chosen, choices, experts, count(flat, num_experts))

    def plan(self, first_row: Array, kept: Array, experts: Int32[Array, " n"], block: int) -> Plan:
        """Expert `e`'s first `kept[e]` choices go to the rows from `first_row[e]` on; the others to none."""
        size, rows = self.chosen.size, experts.size * block
        first = jnp.cumsum(self.counts, dtype=jnp.int32) - self.counts  # where an expert's choices begin
        place = jnp.arange(size, dtype=jnp.int32)
        row = jnp.where(place < _at(first + kept, self.experts), place + _at(first_row - first, self.experts), rows)
        row_of_choice = _put(jnp.zeros(size, jnp.int32), self.choices, row)
        choice_of_row = _put(jnp.full(rows, size, jnp.int32), row, self.choices)
        return Plan(row_of_choice.reshape(self.chosen.shape), choice_of_row.reshape(-1, block), experts)


def _at(x, index):
    """Entries of `x`, all of which are there. No index is negative in this file; said, it spares the compiler much."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _put(x, index, values):
    """`x` with other entries, each set once; those beyond it are left out."""
    return x.at[index].set(values, mode="drop", wrap_negative_indices=False)


def _take(x, index):
    """Rows of `x`, zeros where the index is beyond them."""
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@jax.custom_vjp
def _send(x, plan: Plan):
    # In the dims of the result: XLA moves a reshape behind the choice of zeros over it and back until it gives up.
    return _take(x, plan.choice_of_row.astype(jnp.uint32) // plan.row_of_choice.shape[1])


@jax.custom_vjp
def _send_weights(weights, plan: Plan):
    return _take(weights.reshape(-1), plan.choice_of_row)


@jax.custom_vjp
def _receive(rows, plan: Plan):
    return jnp.sum(_take(rows.reshape(-1, rows.shape[-1]), plan.row_of_choice), axis=1)


# Each is the transpose of another one: what was gathered by the permutation comes back by its inverse.
_send.defvjp(lambda x, plan: (_send(x, plan), plan), lambda plan, slope: (_receive(slope, plan), None))
_send_weights.defvjp(
    lambda weights, plan: (_send_weights(weights, plan), plan),
    lambda plan, slope: (_take(slope.reshape(-1), plan.row_of_choice), None),
)
_receive.defvjp(lambda rows, plan: (_receive(rows, plan), plan), lambda plan, slope: (_send(slope, plan), None))
