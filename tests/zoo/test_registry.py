"""Models by name: what is found, overridden, refused, and that none of it needs jax."""

import dataclasses
import subprocess
import sys

import pytest

import zoo
from tests import helpers
from zoo.registry import differences


def test_every_named_model_has_a_configuration():
    assert {"bench_llama", "bench_deepseek", "debug_llama", "debug_deepseek"} <= set(zoo.names())
    for name in zoo.names():
        assert zoo.config(zoo.config(name)) == zoo.config(name)


def test_overrides_replace_fields_and_leave_the_named_model_alone():
    before = zoo.config("debug_deepseek")
    after = zoo.config("debug_deepseek", num_layers=7, rope={"layout": "half"})
    assert (after.num_layers, after.rope) == (7, dataclasses.replace(before.rope, layout="half"))
    assert dataclasses.replace(after, num_layers=before.num_layers, rope=before.rope) == before
    assert zoo.config("debug_deepseek") == before
    assert zoo.config(before, num_layers=7).num_layers == 7


def test_integers_of_a_file_or_override_become_floats():
    rope = zoo.config("debug_llama").rope
    assert (rope.theta, rope.factor) == (10000.0, 8.0)
    assert {type(rope.theta), type(rope.factor)} == {float}
    assert type(zoo.config("debug_llama", init_std=1).init_std) is float


def test_of_a_nested_configuration_the_other_fields_stay():
    for model in ("deepseek_v3_671b", zoo.config("deepseek_v3_671b")):
        assert zoo.config(model, router={"groups": 4}).router == dataclasses.replace(
            zoo.config("deepseek_v3_671b").router, groups=4
        )


YARN = {"scaling": "yarn", "original_length": 4096, "layout": "interleaved"}
LLAMA3 = {"theta": 5e5, "scaling": "llama3", "original_length": 8192, "layout": "half"}
V2 = {"affinity": "softmax", "selection_bias": False, "normalize": False}
V3 = {"affinity": "sigmoid", "selection_bias": True, "normalize": True, "group_score": "top2"}
# What parameter counts do not show, as in the config.json of the models' makers: eps, rope, router.
PUBLISHED = {
    "llama2_7b": (1e-5, {"theta": 1e4, "scaling": "none", "layout": "half"}, None),
    "llama3_1_8b": (1e-5, LLAMA3 | {"factor": 8.0}, None),
    "llama3_1_70b": (1e-5, LLAMA3 | {"factor": 8.0}, None),
    "llama3_1_405b": (1e-5, LLAMA3 | {"factor": 8.0}, None),
    "llama3_2_1b": (1e-5, LLAMA3 | {"factor": 32.0}, None),
    "llama3_2_3b": (1e-5, LLAMA3 | {"factor": 32.0}, None),
    "deepseek_v2_lite": (
        1e-6,
        YARN | {"theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        V2 | {"groups": 1, "scale": 1.0},
    ),
    "deepseek_v2": (
        1e-6,
        YARN | {"theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        V2 | {"groups": 8, "groups_kept": 3, "group_score": "max", "scale": 16.0},
    ),
    "deepseek_v3_671b": (
        1e-6,
        YARN | {"theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0},
        V3 | {"groups": 8, "groups_kept": 4, "scale": 2.5},
    ),
    "kimi_k2": (
        1e-6,
        YARN | {"theta": 5e4, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
        V3 | {"groups": 1, "scale": 2.827},
    ),
}


@pytest.mark.parametrize(("name", "eps", "rope", "router"), [(name, *each) for name, each in PUBLISHED.items()])
def test_published_models_have_the_settings_of_their_makers(name, eps, rope, router):
    config = zoo.config(name)
    assert config.norm_eps == eps
    assert dataclasses.asdict(config.rope) | rope == dataclasses.asdict(config.rope)
    if router is not None:
        assert dataclasses.asdict(config.router) | router == dataclasses.asdict(config.router)


# model, overrides, what the message says: the key and value, then the nearest match or what is allowed
ERRORS = {
    "model": ("debug_lama", {}, ["model=debug_lama", "did you mean debug_llama", "allowed: bench_deepseek"]),
    "field": ("debug_llama", {"num_layer": 3}, ["model.num_layer=3", "did you mean num_layers"]),
    "nested_field": ("debug_llama", {"rope": {"thta": 3}}, ["model.rope.thta=3", "did you mean theta"]),
    "word": ("debug_llama", {"rope": {"layout": "halv"}}, ["model.rope.layout=halv", "did you mean half"]),
    "affinity": ("debug_deepseek", {"router": {"affinity": "sigmod"}}, ["model.router.affinity=sigmod", "sigmoid"]),
    "zero": ("debug_llama", {"num_layers": 0}, ["model.num_layers=0", "above zero"]),
    "endless": ("debug_llama", {"num_layers": 10**9}, ["model.num_layers=1000000000", "at most 10000"]),
    "negative": ("debug_deepseek", {"num_dense_layers": -1}, ["model.num_dense_layers=-1", "negative"]),
    "type": ("debug_llama", {"num_layers": "abc"}, ["model.num_layers=abc", "int"]),
    "fraction": ("debug_llama", {"num_layers": 2.5}, ["model.num_layers=2.5", "int"]),
    "boolean": ("debug_llama", {"tied_embeddings": "no"}, ["model.tied_embeddings=no", "bool"]),
    "not_nested": ("debug_llama", {"rope": 5}, ["model.rope=5", "RopeConfig"]),
    "kv_heads": ("debug_llama", {"num_kv_heads": 3}, ["model.num_heads=4", "num_kv_heads=3"]),
    "odd_head": ("debug_llama", {"head_dim": 3}, ["model.head_dim=3", "even"]),
    "odd_rope": ("debug_deepseek", {"rope_head_dim": 3}, ["model.rope_head_dim=3", "even"]),
    "dense": ("debug_deepseek", {"num_dense_layers": 5}, ["model.num_dense_layers=5", "4 layers"]),
    "groups": ("debug_deepseek", {"num_experts": 9}, ["model.num_experts=9", "groups=4"]),
    "kept": ("debug_deepseek", {"router": {"groups_kept": 5}}, ["model.router.groups_kept=5", "4 groups"]),
    "reach": ("debug_deepseek", {"experts_per_token": 5}, ["model.experts_per_token=5", "4 experts"]),
    "constant": ("debug_deepseek", {"experts_per_token": 1}, ["model.experts_per_token=1", "router.normalize=false"]),
    "rope_length": ("debug_llama", {"rope": {"original_length": 0}}, ["model.rope.original_length=0", "llama3"]),
}


@pytest.mark.parametrize(("model", "overrides", "parts"), ERRORS.values(), ids=ERRORS)
def test_an_impossible_configuration_names_key_value_and_remedy(model, overrides, parts):
    with pytest.raises(zoo.ConfigError) as error:
        zoo.config(model, **overrides)
    for part in parts:
        assert part in str(error.value)
    assert str(error.value).startswith(parts[0])


def test_what_two_models_differ_in():
    one = zoo.config("deepseek_v3_671b")
    assert differences(one, zoo.config(one, capacity_factor=1.25, init_std=0.1)) == {}
    other = zoo.config(one, num_layers=4, rope={"theta": 5e5})
    assert differences(one, other) == {"num_layers": (61, 4), "rope.theta": (1e4, 5e5)}


def test_the_package_lists_what_it_has():
    assert {"build", "abstract", "count_parameters", "tags", "config", "names", "ConfigError"} <= set(dir(zoo))
    assert all(getattr(zoo, name) is not None for name in dir(zoo))
    with pytest.raises(AttributeError, match="no attribute nothing"):
        zoo.nothing  # noqa: B018


PROGRAM = """
import sys, zoo
zoo.config("debug_deepseek", num_layers=3)
try:
    zoo.config("debug_lama")
except zoo.ConfigError:
    assert not {"jax", "jaxlib", "equinox"} & set(sys.modules), "jax was imported"
    print("free of jax")
"""


def test_configurations_and_their_errors_do_not_import_jax():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=helpers.ROOT)
    assert result.stdout == "free of jax\n", result.stderr
