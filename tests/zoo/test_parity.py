"""Agreement with Hugging Face's transformers, whose outputs tests/peers/generate.py recorded and describes.

`ZOO_PEERS` names another folder of such cases than tests/peers/data.
"""

import functools
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import recipes
import zoo
from layers import split_buffers
from tests import helpers
from tests.peers.cases import CASES

PEERS = Path(os.environ.get("ZOO_PEERS") or helpers.ROOT / "tests/peers/data")

# Hugging Face's name of a module within a layer: ours, dense or not.
OURS = {
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "self_attn.q_a_layernorm": "attention.query_norm",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "mlp": "mlp",
    "mlp.shared_experts": "moe.shared",
    "mlp.experts": "moe.experts",
    "mlp.gate": "moe.router",
}


@functools.cache
def reference(case: str) -> dict[str, np.ndarray]:
    return load_file(PEERS / case / "reference.safetensors")


def part(case: str, prefix: str) -> dict[str, np.ndarray]:
    """The recorded tensors whose names start so, by the rest of the name."""
    return {name.removeprefix(prefix): x for name, x in reference(case).items() if name.startswith(prefix)}


def modules() -> list[tuple[str, str]]:
    """Each case with each layer's module that it recorded; only headers are read."""
    found = []
    for case in CASES:
        with safe_open(PEERS / case / "reference.safetensors", "numpy") as file:
            found += sorted({(case, name.split("/")[1]) for name in file.keys() if name.startswith("module/model")})  # noqa: SIM118
    return found


@functools.cache
def load(case: str) -> Any:
    return zoo.load(PEERS / case)


@functools.cache
def computed(case: str) -> tuple[np.ndarray, np.ndarray, Any]:
    """Logits, loss and gradients; None for buffers."""

    @helpers.jit
    def run(parameters, buffers, tokens):
        def loss(parameters):
            summed = recipes.next_token_loss(eqx.combine(parameters, buffers), {"tokens": tokens})
            return summed.total / summed.weight

        return eqx.combine(parameters, buffers)(tokens), *eqx.filter_value_and_grad(loss)(parameters)

    return helpers.host(run(*split_buffers(load(case)), reference(case)["tokens"]))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str):
    helpers.assert_close_in_norm(computed(case)[0], reference(case)["logits"], helpers.PEER_LOGITS)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_equals_that_of_transformers(case: str):
    assert abs(computed(case)[1] - reference(case)["loss"]) <= helpers.PEER_LOSS


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_transformers(case: str, tmp_path: Path):
    """Of every parameter and expert; those of tokens and experts that have none are zero exactly."""
    zoo.export(computed(case)[2], tmp_path)
    actual, expected = {}, part(case, "grad/")
    for shard in tmp_path.glob("*.safetensors"):
        actual |= load_file(shard)
    assert actual.keys() == expected.keys()
    helpers.assert_close_in_norm(actual, expected, helpers.PEER_GRADIENT)
    for name, gradient in expected.items():
        assert (actual[name][gradient == 0] == 0).all(), name


@pytest.mark.parametrize("case", CASES)
def test_layers_of_multi_token_prediction_are_those_whose_tensors_are_there(case: str):
    """`deepseek_v3` announces one in its configuration and has none."""
    assert load(case).mtp == ()


def ours(model: Any, name: str) -> Any:
    """Our module of a Hugging Face name such as `model.layers.1.mlp.gate`."""
    layer, _, within = name.removeprefix("model.layers.").partition(".")
    block = model.layers.blocks[int(layer)]
    return block.moe if within == "mlp" and hasattr(block, "moe") else attrgetter(OURS[within])(block)


@functools.cache
def outputs(case: str) -> dict[str, Any]:
    """What our modules return for the inputs that transformers' modules had, by name; compiled once a case."""

    @helpers.jit
    def run(model, recorded, positions):
        found = {}
        for name, given in recorded.items():
            module, x = ours(model, name), given["in"]
            if name.endswith("self_attn"):
                found[name] = module(x, model.rope(positions))
            elif name.endswith("mlp.gate"):
                found[name] = module(x[None])
            elif name.endswith("mlp.experts"):
                found[name] = module(x, given["weights"], given["indices"])[0]
            else:
                out = module(x)
                found[name] = out[0] if isinstance(out, tuple) else out
        return found

    names = [name for of, name in modules() if of == case]
    positions = np.arange(reference(case)["tokens"].shape[1], dtype=np.int32)[None]
    return helpers.host(run(load(case), {name: part(case, f"module/{name}/") for name in names}, positions))


@pytest.mark.parametrize(("case", "name"), modules())
def test_each_module_equals_that_of_transformers(case: str, name: str):
    recorded, actual = part(case, f"module/{name}/"), outputs(case)[name]
    if name.endswith("mlp.gate"):
        order = np.argsort(actual.chosen[0], axis=-1)
        helpers.assert_bit_equal(np.take_along_axis(actual.chosen[0], order, -1), recorded["indices"])
        actual, recorded["out"] = np.take_along_axis(actual.weights[0], order, -1), recorded["weights"]
    helpers.assert_close_in_norm(actual, recorded["out"], helpers.PEER_MODULE)


@pytest.mark.parametrize("case", CASES)
def test_rotary_embedding_equals_that_of_transformers(case: str):
    recorded, rope = part(case, "module/rotary/"), load(case).rope
    rotation = helpers.jit(lambda positions: rope(positions))(recorded["positions"])
    helpers.assert_close_in_norm([rotation.cos, rotation.sin], [recorded["cos"], recorded["sin"]], helpers.PEER_MODULE)
    out = recorded["out"]
    if CASES[case].family == "deepseek_v3":  # whose halves are our pairs
        out = out.reshape(*out.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(out.shape)
    turned = helpers.jit(lambda rotation, x: rotation(x))(rotation, recorded["in"])
    helpers.assert_close_in_norm(turned, out, helpers.PEER_MODULE)


GATE = "module/model.layers.1.mlp.gate/"


def chosen(scores: np.ndarray, groups: int, kept: int, best: int, k: int, masked: float) -> np.ndarray:
    """The `k` experts of largest score, ascending, where those of dropped groups score `masked`."""
    grouped = scores.reshape(len(scores), groups, -1)
    order = np.argsort(-np.sort(grouped, axis=-1)[..., -best:].sum(-1), axis=-1)
    grouped = grouped.copy()
    np.put_along_axis(grouped, order[:, kept:, None], masked, axis=1)
    return np.sort(np.argsort(-grouped.reshape(scores.shape), axis=-1)[:, :k], axis=-1)


def test_dropped_groups_score_zero_in_v2_which_is_as_good_as_minus_infinity():
    """transformers 5.24, `DeepseekV2TopkRouter`: `masked_fill(..., 0.0)`, but of a softmax, which is positive."""
    router, recorded = load("deepseek_v2").layers.blocks[1].moe.router, part("deepseek_v2", GATE)
    scores = np.exp(recorded["in"] @ np.asarray(router.weight))
    for masked in (0.0, -np.inf):
        choice = chosen(scores, router.groups, router.groups_kept, 1, router.experts_per_token, masked)
        helpers.assert_bit_equal(choice.astype(np.int32), recorded["indices"])


def test_dropped_groups_score_minus_infinity_in_v3_which_matters_for_negative_scores():
    """transformers 5.24, `DeepseekV3TopkRouter`: `masked_fill(..., float("-inf"))`; a bias may lower scores below zero.

    With each bias lowered by 2, all scores are negative: transformers and we choose as before; by a mask of zeros,
    experts of dropped groups would come first.
    """
    router, recorded = load("deepseek_v3").layers.blocks[1].moe.router, part("deepseek_v3", GATE)
    lowered = eqx.tree_at(lambda r: r.bias.value, router, jnp.asarray(np.asarray(router.bias.value) - 2))
    routing = helpers.jit(lambda router, x: router(x))(lowered, recorded["in"][None])
    helpers.assert_bit_equal(np.sort(np.asarray(routing.chosen)[0], axis=-1), recorded["lowered_indices"])
    helpers.assert_bit_equal(recorded["lowered_indices"], recorded["indices"])
    scores = 1 / (1 + np.exp(-recorded["in"] @ np.asarray(router.weight))) + np.asarray(lowered.bias.value)
    by_mask = {
        masked: chosen(scores, router.groups, router.groups_kept, 2, router.experts_per_token, masked)
        for masked in (0.0, -np.inf)
    }
    helpers.assert_bit_equal(by_mask[-np.inf].astype(np.int32), recorded["indices"])
    assert (by_mask[0.0] != recorded["indices"]).any(axis=-1).all()
