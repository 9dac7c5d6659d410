"""Rotary position embedding (Su et al., arXiv 2104.09864), plain, Llama-3 scaled and YaRN scaled."""

import math
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Int

Layout = Literal["half", "interleaved"]


class Rotation(eqx.Module):
    """Cosines and sines of the angles of each position, and which coordinates form the rotated pairs.

    `half` pairs coordinate `i` with `i + dim/2` (Hugging Face Llama), `interleaved` `2i` with `2i + 1` (DeepSeek).
    """

    cos: Float[Array, "batch seq half"]
    sin: Float[Array, "batch seq half"]
    layout: Layout = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch seq heads dim"]) -> Float[Array, "batch seq heads dim"]:
        """Rotates each pair `(a, b)` to `(a cos - b sin, b cos + a sin)`, in float32."""
        pairs = "(two half)" if self.layout == "half" else "(half two)"
        a, b = rearrange(x.astype(jnp.float32), f"b s h {pairs} -> two b s h half", two=2)
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]  # not broadcast: JAX would keep them for every head
        rotated = rearrange([a * cos - b * sin, b * cos + a * sin], f"two b s h half -> b s h {pairs}")
        return rotated.astype(x.dtype)


class Rope(eqx.Module):
    """Positions to `Rotation`. Holds no arrays: frequencies are `theta^(-2i/dim)`, then scaled.

    `scaling`: `none`; `llama3` (Llama 3.1; Hugging Face `_compute_llama3_parameters`); `yarn` (Peng et al., arXiv
    2309.00071; Hugging Face `_compute_yarn_parameters`).
    """

    dim: int = eqx.field(static=True)
    theta: float = eqx.field(static=True, default=10000.0)
    layout: Layout = eqx.field(static=True, default="half")
    scaling: Literal["none", "llama3", "yarn"] = eqx.field(static=True, default="none")
    factor: float = eqx.field(static=True, default=1.0)
    original_length: int = eqx.field(static=True, default=0)
    low_freq_factor: float = eqx.field(static=True, default=1.0)
    high_freq_factor: float = eqx.field(static=True, default=4.0)
    beta_fast: float = eqx.field(static=True, default=32.0)
    beta_slow: float = eqx.field(static=True, default=1.0)
    mscale: float = eqx.field(static=True, default=1.0)
    mscale_all_dim: float = eqx.field(static=True, default=0.0)

    def __check_init__(self):
        if self.dim % 2:
            raise ValueError(f"rotary dim must be even, got dim={self.dim}")
        if self.scaling != "none" and self.original_length <= 0:
            raise ValueError(f"{self.scaling} rope scaling needs original_length, got {self.original_length}")

    def frequencies(self) -> np.ndarray:
        """Angular frequency of each pair, radians a position, `[dim/2]`."""
        plain = self.theta ** (-np.arange(0, self.dim, 2) / self.dim)
        if self.scaling == "llama3":
            return _llama3(plain, self)
        if self.scaling == "yarn":
            return _yarn(plain, self)
        return plain

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines: YaRN's `mscale(factor, mscale) / mscale(factor, mscale_all_dim)`."""
        if self.scaling != "yarn":
            return 1.0
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by: `mscale(factor, mscale_all_dim)^2` under YaRN (DeepSeek V2/V3)."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2 if self.scaling == "yarn" else 1.0

    def __call__(self, positions: Int[Array, "batch seq"]) -> Rotation:
        frequencies = jnp.asarray(self.frequencies(), jnp.float32)
        angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
        return Rotation(self.amplitude * jnp.cos(angles), self.amplitude * jnp.sin(angles), self.layout)


def yarn_mscale(factor: float, mscale: float) -> float:
    """`0.1 mscale ln(factor) + 1` above factor 1; 1 where `mscale` is 0."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: np.ndarray, rope: Rope) -> np.ndarray:
    turns = rope.original_length * plain / (2 * math.pi)  # rotations over the original length
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(plain: np.ndarray, rope: Rope) -> np.ndarray:
    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns so many times over the original length."""
        return rope.dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(rope.beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.beta_slow)), rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
