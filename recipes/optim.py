"""The optimizer of a recipe. Any other optax transformation can be passed to the train step instead."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.checks import ConfigError, require_choice, require_positive

if TYPE_CHECKING:
    import optax


# Schedule -> the defaults of what it takes; a fraction that it does not name is refused.
SCHEDULES: dict[str, dict[str, float]] = {
    "warmup_cosine": {"warmup_fraction": 0.1, "final_fraction": 0.1},
    "warmup_stable_decay": {"warmup_fraction": 0.1, "decay_fraction": 0.2, "final_fraction": 0.1},
    "constant": {"warmup_fraction": 0.0},
}
FRACTIONS = ("warmup_fraction", "decay_fraction", "final_fraction")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with clipping by the global norm (None: no clipping) and a schedule of the learning rate.

    - `schedule`: every one rises linearly over `warmup_fraction` of the steps to `learning_rate`. Then
      `warmup_cosine` falls along a cosine to `final_fraction` of it; `warmup_stable_decay` stays, and falls linearly
      to that over the last `decay_fraction` of the steps (MiniCPM, arXiv 2404.06395, section 4; the linear fall:
      arXiv 2405.18392); `constant` stays. Fractions that are None are those of `SCHEDULES`.
    - `moment_dtype`: of both moments between steps; `bfloat16` halves them (DeepSeek-V3, section 3.3.2). The update is
      computed in float32.

    Matrices decay; norms, vectors and embeddings do not.
    """

    learning_rate: float = 3e-4
    schedule: str = "warmup_cosine"
    warmup_fraction: float | None = None
    decay_fraction: float | None = None
    final_fraction: float | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    moment_dtype: str = "float32"

    def __post_init__(self):
        require_positive("optimizer", self, "learning_rate", "eps")
        require_choice("optimizer.schedule", self.schedule, SCHEDULES)
        require_choice("optimizer.moment_dtype", self.moment_dtype, ("float32", "bfloat16"))
        self._require_fractions()
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:  # at 1 Adam divides by 1 - beta^step = 0
                raise ConfigError(f"optimizer.{name}", getattr(self, name), "must be between 0 and 1, and below 1")
        if self.weight_decay < 0:
            raise ConfigError("optimizer.weight_decay", self.weight_decay, "must not be negative")
        if self.clip_norm is not None:
            require_positive("optimizer", self, "clip_norm")

    def fraction(self, name: str) -> float:
        """The fraction of that name, as given or by default; 0 where the schedule has none."""
        given = getattr(self, name)
        return SCHEDULES[self.schedule].get(name, 0.0) if given is None else given

    def _require_fractions(self) -> None:
        taken = SCHEDULES[self.schedule]
        for name in FRACTIONS:
            value = getattr(self, name)
            if value is not None and name not in taken:
                hint = f"it takes {' and '.join(taken)}"
                raise ConfigError(f"optimizer.{name}", value, f"has no effect on schedule={self.schedule}", hint=hint)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"optimizer.{name}", value, "must be between 0 and 1")
        if self.fraction("warmup_fraction") + self.fraction("decay_fraction") > 1:
            problem = f"with warmup_fraction={self.fraction('warmup_fraction'):g} that is more than all steps"
            raise ConfigError("optimizer.decay_fraction", self.fraction("decay_fraction"), problem)


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
    """Learning rate by the number of steps done: of a run of `steps` steps the last one has that at `steps - 1`.

    The first step has `1 / warmup` of the peak, `warmup` the steps of warm-up; at `steps` a fall has reached its end.
    """
    import optax

    peak, final = config.learning_rate, config.fraction("final_fraction") * config.learning_rate
    warmup = max(1, round(config.fraction("warmup_fraction") * steps))
    if config.schedule == "warmup_cosine":
        return optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, max(steps, warmup + 1), final)
    if config.schedule == "constant" and not config.fraction("warmup_fraction"):
        return optax.constant_schedule(peak)
    parts, boundaries = [optax.linear_schedule(peak / warmup, peak, warmup), optax.constant_schedule(peak)], [warmup]
    if config.schedule == "warmup_stable_decay":
        decay = max(1, round(config.fraction("decay_fraction") * steps))
        parts.append(optax.linear_schedule(peak, final, decay))
        boundaries.append(max(warmup, steps - decay))
    return optax.join_schedules(parts, boundaries)


def decays(params: Any) -> Any:
    """Which parameters weight decay shrinks: the matrices of linear layers, routers and experts; PyTree of booleans."""
    import jax

    from layers import Embedding, RMSNorm

    def mark(node: Any) -> Any:
        return jax.tree.map(lambda _: not isinstance(node, Embedding | RMSNorm), node)

    return jax.tree.map(mark, params, is_leaf=lambda node: isinstance(node, Embedding | RMSNorm))
