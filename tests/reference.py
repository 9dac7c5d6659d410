"""NumPy float64 oracles, written from the papers as plain loops and independent of `layers`.

Weights are mappings of arrays `[in, out]`; activations have no batch dim (`seq dim`) unless said.
"""

import math
from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Zhang and Sennrich, eq. 4."""
    return x / np.sqrt((x**2).sum(-1, keepdims=True) / x.shape[-1] + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Shazeer, eq. 6."""
    return (silu(x @ gate) * (x @ up)) @ down


def plain_frequencies(dim: int, theta: float) -> np.ndarray:
    """Su et al., section 3.2.2."""
    return np.array([1 / theta ** (2 * i / dim) for i in range(dim // 2)])


def llama3_frequencies(
    dim: int, theta: float, factor: float, original_length: int, low: float = 1.0, high: float = 4.0
) -> np.ndarray:
    """Meta's `apply_scaling`: by the wavelength of each pair."""
    scaled = []
    for frequency in plain_frequencies(dim, theta):
        wavelength = 2 * math.pi / frequency
        if wavelength < original_length / high:
            scaled.append(frequency)
        elif wavelength > original_length / low:
            scaled.append(frequency / factor)
        else:
            smooth = (original_length / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(scaled)


def yarn_frequencies(
    dim: int, theta: float, factor: float, original_length: int, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> np.ndarray:
    """DeepSeek's `precompute_freqs_cis`: interpolated where a pair turns less than `beta_slow` times."""

    def correction(rotations: float) -> float:
        return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(correction(beta_fast)), 0), min(math.ceil(correction(beta_slow)), dim - 1)
    scaled = []
    for i, frequency in enumerate(plain_frequencies(dim, theta)):
        extrapolated = 1 - min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
        scaled.append(extrapolated * frequency + (1 - extrapolated) * frequency / factor)
    return np.array(scaled)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, layout: str) -> np.ndarray:
    """Each pair as a complex number times `exp(i position frequency)`; `x` is `[seq heads dim]`."""
    y, half = np.zeros(x.shape), x.shape[-1] // 2
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + half)
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * frequency * np.asarray(positions, np.float64))[:, None]
        y[..., a], y[..., b] = turned.real, turned.imag
    return y


def attend(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, segments: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Context `[seq heads value_dim]` and log-sum-exp `[heads seq]` of causal attention, row by row."""
    length, heads, _ = query.shape
    segments = np.zeros(length) if segments is None else segments
    context, lse = np.zeros((length, heads, value.shape[-1])), np.zeros((heads, length))
    for t in range(length):
        seen = [s for s in range(t + 1) if segments[s] == segments[t]]
        for h in range(heads):
            shared = h // (heads // key.shape[1])
            scores = np.array([scale * query[t, h] @ key[s, shared] for s in seen])
            weights = np.exp(scores - scores.max())
            lse[h, t] = scores.max() + math.log(weights.sum())
            context[t, h] = weights / weights.sum() @ value[seen, shared]
    return context, lse


def attention(
    x: np.ndarray,
    w: Weights,
    heads: int,
    kv_heads: int,
    frequencies: np.ndarray,
    layout: str = "half",
    segments: np.ndarray | None = None,
) -> np.ndarray:
    """Grouped-query attention at positions 0, 1, ... (Ainslie et al.)."""
    length = x.shape[0]
    query, key, value = (
        (x @ w[name]).reshape(length, count, -1)
        for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    )
    query, key = (rotate(part, np.arange(length), frequencies, layout) for part in (query, key))
    context, _ = attend(query, key, value, 1 / math.sqrt(query.shape[-1]), segments)
    return context.reshape(length, -1) @ w["out"]


def mla(
    x: np.ndarray,
    w: Weights,
    heads: int,
    nope_dim: int,
    frequencies: np.ndarray,
    *,
    layout: str = "interleaved",
    amplitude: float = 1.0,
    softmax_factor: float = 1.0,
    eps: float = 1e-6,
    segments: np.ndarray | None = None,
) -> np.ndarray:
    """DeepSeek-V2, eq. 37-47, head by head; without `query_down` the queries have no latent."""
    length, positions = x.shape[0], np.arange(x.shape[0])
    rank = w["kv_norm"].shape[0]
    down = x @ w["kv_down"]
    up = (rms_norm(down[:, :rank], w["kv_norm"], eps) @ w["kv_up"]).reshape(length, heads, -1)
    shared = amplitude * rotate(down[:, None, rank:], positions, frequencies, layout)
    latent = rms_norm(x @ w["query_down"], w["query_norm"], eps) if "query_down" in w else x
    query = (latent @ w["query_up"]).reshape(length, heads, -1)
    query_rope = amplitude * rotate(query[..., nope_dim:], positions, frequencies, layout)
    scale = softmax_factor / math.sqrt(query.shape[-1])
    contexts = []
    for h in range(heads):
        q = np.concatenate([query[:, h, :nope_dim], query_rope[:, h]], -1)
        k = np.concatenate([up[:, h, :nope_dim], shared[:, 0]], -1)
        contexts.append(attend(q[:, None], k[:, None], up[:, h : h + 1, nope_dim:], scale, segments)[0][:, 0])
    return np.concatenate(contexts, -1) @ w["out"]


def affinities(scores: np.ndarray, kind: str) -> np.ndarray:
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-scores))
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def route(
    affinity: np.ndarray,
    k: int,
    bias: np.ndarray | None = None,
    *,
    groups: int = 1,
    groups_kept: int = 1,
    group_score: str = "top2",
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and chosen experts of each token (DeepSeek-V3, eq. 12-16; V2, section 2.2.2), best expert first."""
    tokens, experts = affinity.shape
    size = experts // groups
    weights, chosen = np.zeros((tokens, k)), np.zeros((tokens, k), int)
    for t in range(tokens):
        biased = affinity[t] + (0 if bias is None else bias)
        counted = 2 if group_score == "top2" else 1
        group_scores = [sum(sorted(biased[g * size : (g + 1) * size])[-counted:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -group_scores[g])[:groups_kept]
        allowed = [e for e in range(experts) if e // size in kept]
        best = sorted(allowed, key=lambda e: -biased[e])[:k]
        chosen[t], weights[t] = best, affinity[t, best]
        weights[t] *= scale / (weights[t].sum() if normalize else 1)
    return weights, chosen


def balance_loss(affinity: np.ndarray, k: int) -> float:
    """DeepSeek-V3, eq. 17-20 without the factor alpha, of one sequence `[seq experts]`."""
    length, experts = affinity.shape
    loss = 0.0
    for i in range(experts):
        hits = sum(i in np.argsort(-affinity[t], kind="stable")[:k] for t in range(length))
        share = sum(affinity[t, i] / affinity[t].sum() for t in range(length)) / length
        loss += experts / (k * length) * hits * share
    return loss


def experts(x: np.ndarray, w: Weights, weights: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Token by token: the weighted sum of its experts' outputs (DeepSeekMoE, eq. 3)."""
    y = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t], chosen[t], strict=True):
            y[t] += weight * swiglu(x[t], w["gate"][e], w["up"][e], w["down"][e])
    return y
