"""The optimizer of a recipe. Any other optax transformation can be passed to the train step instead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.checks import ConfigError, require_choice, require_positive

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with clipping by the global norm (None: no clipping) and a schedule of the learning rate.

    `schedule`: `warmup_cosine` rises linearly over `warmup_fraction` of the steps and falls along a cosine to
    `final_fraction` of the peak; `constant` stays. Matrices decay; norms, vectors and embeddings do not.
    `moment_dtype`: of both moments between steps; `bfloat16` halves them (DeepSeek-V3, section 3.3.2). The update is
    computed in float32.
    """

    learning_rate: float = 3e-4
    schedule: str = "warmup_cosine"
    warmup_fraction: float = 0.1
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    moment_dtype: str = "float32"

    def __post_init__(self):
        require_positive("optimizer", self, "learning_rate", "eps")
        require_choice("optimizer.schedule", self.schedule, ("warmup_cosine", "constant"))
        require_choice("optimizer.moment_dtype", self.moment_dtype, ("float32", "bfloat16"))
        for name in ("warmup_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optimizer.{name}", getattr(self, name), "must be between 0 and 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:  # at 1 Adam divides by 1 - beta^step = 0
                raise ConfigError(f"optimizer.{name}", getattr(self, name), "must be between 0 and 1, and below 1")
        if self.weight_decay < 0:
            raise ConfigError("optimizer.weight_decay", self.weight_decay, "must not be negative")
        if self.clip_norm is not None:
            require_positive("optimizer", self, "clip_norm")


def make_optimizer(config: OptimizerConfig, steps: int, decay_mask: Any = None) -> "optax.GradientTransformation":
    """The optax chain: clip, Adam, decoupled decay, learning rate (kept in the state, for the metrics).

    `decay_mask`: a PyTree of booleans or a function of the parameters, as optax takes it; default `decays`.
    """
    import optax

    schedule = make_schedule(config, steps)
    parts = [] if config.clip_norm is None else [clip_by_global_norm(config.clip_norm)]
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    parts += [
        adam if config.moment_dtype == "float32" else _stored_as(adam, config.moment_dtype),
        optax.add_decayed_weights(config.weight_decay, decays if decay_mask is None else decay_mask),
        optax.inject_hyperparams(optax.scale_by_learning_rate)(schedule),
    ]
    return optax.chain(*parts)


def clip_by_global_norm(max_norm: float) -> "optax.GradientTransformationExtraArgs":
    r"""$g \leftarrow g \min(1, \text{max\_norm} / \lVert g \rVert)$ with the norm over all gradients.

    As `optax.clip_by_global_norm`, but it takes the norm that the train step has computed, as `global_norm`: so it can
    be applied to a part of the gradients, as where the state is on the host.
    """
    import jax
    import jax.numpy as jnp
    import optax

    def update(updates: Any, state: Any, params: Any = None, *, global_norm: Any = None, **_: Any) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if global_norm is None else global_norm
        clipped = jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm.astype(g.dtype) * max_norm), updates)
        return clipped, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _stored_as(inner: "optax.GradientTransformation", dtype: str) -> "optax.GradientTransformation":
    """The transformation with the floats of its state in `dtype` between updates, which see them in float32."""
    import jax
    import jax.numpy as jnp
    import optax

    def cast(state: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(inner.init(params), dtype), update)


def make_schedule(config: OptimizerConfig, steps: int) -> Callable[[Any], Any]:
    """Learning rate by step."""
    import optax

    if config.schedule == "constant":
        return optax.constant_schedule(config.learning_rate)
    warmup = max(1, round(config.warmup_fraction * steps))
    final = config.final_fraction * config.learning_rate
    return optax.warmup_cosine_decay_schedule(
        config.learning_rate / warmup, config.learning_rate, warmup, max(steps, warmup + 1), final
    )


def decays(params: Any) -> Any:
    """Which parameters weight decay shrinks: the matrices of linear layers, routers and experts; PyTree of booleans."""
    import jax

    from layers import Embedding, RMSNorm

    def mark(node: Any) -> Any:
        return jax.tree.map(lambda _: not isinstance(node, Embedding | RMSNorm), node)

    return jax.tree.map(mark, params, is_leaf=lambda node: isinstance(node, Embedding | RMSNorm))
