"""Models by name: what is found, overridden, refused, and that none of it needs jax."""

import dataclasses
import subprocess
import sys

import pytest

import zoo
from tests import helpers


def test_every_named_model_has_a_configuration():
    assert {"bench_llama", "bench_deepseek", "debug_llama", "debug_deepseek"} <= set(zoo.names())
    for name in zoo.names():
        assert zoo.config(zoo.config(name)) == zoo.config(name)


def test_overrides_replace_fields_and_leave_the_named_model_alone():
    before = zoo.config("debug_deepseek")
    after = zoo.config("debug_deepseek", num_layers=7, rope={"layout": "half"})
    assert (after.num_layers, after.rope) == (7, zoo.RopeConfig(layout="half"))
    assert dataclasses.replace(after, num_layers=before.num_layers, rope=before.rope) == before
    assert zoo.config("debug_deepseek") == before
    assert zoo.config(before, num_layers=7).num_layers == 7


def test_integers_of_a_file_or_override_become_floats():
    rope = zoo.config("debug_llama").rope
    assert (rope.theta, rope.factor) == (10000.0, 8.0)
    assert {type(rope.theta), type(rope.factor)} == {float}
    assert type(zoo.config("debug_llama", init_std=1).init_std) is float


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
    "kept": ("debug_deepseek", {"router": {"groups_kept": 3}}, ["model.router.groups_kept=3", "1 groups"]),
    "reach": ("debug_deepseek", {"experts_per_token": 5}, ["model.experts_per_token=5", "4 experts"]),
    "constant": ("debug_deepseek", {"experts_per_token": 1}, ["model.experts_per_token=1", "router.normalize=false"]),
    "rope_length": ("debug_llama", {"rope": {"scaling": "yarn"}}, ["model.rope.original_length=0", "yarn"]),
}


@pytest.mark.parametrize(("model", "overrides", "parts"), ERRORS.values(), ids=ERRORS)
def test_an_impossible_configuration_names_key_value_and_remedy(model, overrides, parts):
    with pytest.raises(zoo.ConfigError) as error:
        zoo.config(model, **overrides)
    for part in parts:
        assert part in str(error.value)
    assert str(error.value).startswith(parts[0])


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
