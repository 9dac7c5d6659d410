"""Programs compiled for an H200 that is not there: host memory to the byte, device memory within a tenth."""

import functools
import math
import random
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

from layers import Experts
from recipes import Placement, Table, init_state, make_train_step, next_token_loss, place, resolve
from recipes.flags import compiler_options
from recipes.placement.spec import PLACES
from recipes.plan.compile import CompiledMemory, compile_for
from recipes.plan.targets import Target
from recipes.verify import check_hlo, trace
from tests import helpers
from tests.recipes.common import savable_once
from tests.recipes.test_policy import BODIES, loss as scan_loss
from zoo.deepseek.config import DeepSeekConfig, RouterConfig
from zoo.llama.config import LlamaConfig
from zoo.models import abstract

pytestmark = pytest.mark.usefixtures(savable_once.__name__)

# Most of the memory is activations: the scores of the layer at work, and some 350 floats a token and layer to keep.
# What a layer sends to the host is on its way for a while: that is to be little beside the layer at work.
BATCH, SEQ = 4, 256
LLAMA = LlamaConfig(vocab_size=16, dim=32, num_layers=12, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=96)
DEEPSEEK = DeepSeekConfig(
    vocab_size=16,
    dim=32,
    num_layers=8,
    num_dense_layers=1,
    num_heads=8,
    query_rank=24,
    kv_rank=16,
    nope_head_dim=2,
    rope_head_dim=2,
    value_head_dim=4,
    mlp_dim=96,
    expert_dim=32,
    num_experts=4,
    experts_per_token=2,
    num_shared_experts=1,
    router=RouterConfig(groups=2, groups_kept=1),
)
MODELS = {"llama": LLAMA, "deepseek": DEEPSEEK}
EXAMPLE = (jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32),)
TOKENS = {"tokens": jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)}
# (model, seed, layers, at most so many stretches of layers)
RANDOM = [("llama", seed, 12, 3) for seed in range(14)] + [("deepseek", seed, 8, 3) for seed in range(6)]
DEEP = [("llama", seed, 32, 10) for seed in range(10)]  # more segments: tests/bench/compile_runs.py
QUICK = {("llama", 12): 2, ("deepseek", 8): 1, ("llama", 32): 1}  # how many of them the default profile compiles


def compiled(function: Any, *args: Any, more: Any = helpers.KERNELS) -> CompiledMemory:
    """With the options of a train step, and more."""
    options = compiler_options("cuda") | more
    return compile_for(jax.jit(function, compiler_options=options), *args, target=Target.named("h200"))


@functools.cache
def model(name: str, num_layers: int) -> Any:
    return abstract(MODELS[name], num_layers=num_layers)


def total(model: Any, batch: Any) -> Any:
    return next_token_loss(model, batch, balance=0.1).total


@functools.cache
def all_host(name: str) -> tuple[Table, CompiledMemory]:
    return gradient(name, Placement(default="host"))


def gradient(
    name: str, placement: Placement, num_layers: int | None = None, more: Any = helpers.KERNELS
) -> tuple[Table, CompiledMemory]:
    """The gradient of a placed model's loss, compiled, and the table that it was asked for."""
    canonical = model(name, MODELS[name].num_layers if num_layers is None else num_layers)
    table = resolve(placement, canonical, EXAMPLE)
    return table, compiled(jax.grad(total), place(canonical, placement, table=table), TOKENS, more=more)


@functools.cache
def all_remat(name: str, num_layers: int | None = None) -> tuple[Table, CompiledMemory]:
    return gradient(name, Placement(), num_layers)


def assert_as_asked(name: str, table: Table, memory: CompiledMemory, num_layers: int | None = None) -> None:
    """Host bytes equal the asked ones; the device holds what the all-remat program holds, and what the table adds."""
    assert memory.host_temp_bytes == table.place_bytes("host"), str(table)
    remat_table, remat = all_remat(name, num_layers)
    added = table.place_bytes("device") - remat_table.place_bytes("device")
    assert memory.temp_bytes <= helpers.DEVICE_MEMORY * remat.temp_bytes + added, str(table)


@pytest.mark.parametrize("name", MODELS if helpers.LONG else ["llama"])
def test_nothing_is_on_the_host_where_nothing_is_asked(name: str):
    table, memory = all_remat(name)
    assert table.place_bytes("host") == memory.host_temp_bytes == 0
    assert memory.temp_bytes > table.place_bytes("device") > 0


@pytest.mark.parametrize("name", MODELS)
def test_all_layers_on_the_host(name: str):
    """Case 16: the last one included."""
    table, memory = all_host(name)
    assert table.place_bytes("host") > 4 * 2**20
    assert_as_asked(name, table, memory)


# A slice of a host array (memory space 5) by its size and where the loop reads it: offset + iteration * stride.
HOST_READ = re.compile(
    r"f32\[(\d+),([\d,]+)\]\S*:S\(5\)} parameter\(0\)(?:(?!\n}).)*ROOT [^\n]* dynamic-slice\("
    r'[^\n]*"linear":{"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"}',
    re.DOTALL,
)


@pytest.mark.parametrize("name", MODELS)
def test_the_backward_pass_reads_the_host_from_the_last_layer_on(name: str):
    """Case 1: jaxlib up to 0.11.0 read in forward order, and gradients were wrong without a word."""
    _, memory = all_host(name)
    reads = [tuple(map(str, found)) for found in HOST_READ.findall(memory.hlo)]
    assert len(reads) >= 8
    for layers, shape, offset, stride in reads:
        layer_bytes = 4 * math.prod(map(int, shape.split(",")))
        assert (int(offset), int(stride)) == ((int(layers) - 1) * layer_bytes, -layer_bytes)


def test_all_on_the_device_is_seen_as_such():
    """The bound is one of memory, not of anything: without what the table adds it is broken."""
    table, memory = gradient("llama", Placement(default="device"))
    assert_as_asked("llama", table, memory)
    assert memory.temp_bytes > helpers.DEVICE_MEMORY * all_remat("llama")[1].temp_bytes


def test_one_layer_on_the_host():
    table, memory = gradient("llama", Placement(layers={"last": {"mlp_gate": "host"}}))
    assert table.place_bytes("host") == BATCH * SEQ * 96 * 4
    assert_as_asked("llama", table, memory)


def test_single_layers_of_32_on_the_host():
    """Case 14: runs of one layer, which XLA would otherwise inline, dropping their copies."""
    table, memory = gradient("llama", Placement(layers={"6+13+19+25+31": {"mlp_up": "host"}}), 32)
    assert table.num_segments == 10
    assert table.place_bytes("host") == 5 * BATCH * SEQ * 96 * 4
    assert_as_asked("llama", table, memory, 32)


def test_a_pattern_of_two_layers_in_one_scan():
    """Every second layer; what it costs in device memory is not bounded, hence not asserted."""
    table, memory = gradient(
        "llama", Placement(layers={"0+2+4+6+8+10": {"mlp_up": "host"}}, group=2), more=helpers.FEWER_KERNELS
    )
    assert table.num_segments == 1
    assert memory.host_temp_bytes == table.place_bytes("host") == 6 * BATCH * SEQ * 96 * 4


def test_arrays_of_one_shape_on_both_places():
    """Case 15."""
    table, memory = gradient("llama", Placement(activations={"mlp_gate": "device", "mlp_up": "host"}))
    assert table.place_bytes("host") == 12 * BATCH * SEQ * 96 * 4
    assert_as_asked("llama", table, memory)


def chosen(tables: list[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    return tables if helpers.LONG else [each for each in tables if each[1] < QUICK[each[0], each[2]]]


def drawn(name: str, seed: int, num_layers: int, stretches: int) -> Placement:
    """A random placement: stretches of layers, each with one of at most three random rows.

    The plan of the dispatch stays where it is: XLA pads its few integers, and bytes are to be equal.
    """
    draw = random.Random(f"{name} {seed}")
    found = resolve(Placement(), model(name, num_layers), EXAMPLE)
    tags = {tag for layer in found.layers for tag in layer if not tag.endswith(("_lse", "_plan"))}
    starts = {0, *draw.sample(range(num_layers), draw.randint(stretches // 2, stretches - 1))}
    rows = [
        {tag: draw.choice(("device", "host") if tag == "block_input" else PLACES) for tag in sorted(tags)}
        for _ in range(3)
    ]
    layers, row = {}, {}
    for number, cells in enumerate(found.layers):
        row = draw.choice(rows) if number in starts else row
        layers[str(number)] = {tag: row[tag] for tag in cells if tag in row}
    return Placement(layers=layers)


@pytest.mark.parametrize(("name", "seed", "num_layers", "stretches"), chosen(RANDOM))
def test_random_tables(name: str, seed: int, num_layers: int, stretches: int):
    """The report of the compiled check agrees with the table, cell by cell and to the byte."""
    table, memory = gradient(name, drawn(name, seed, num_layers, stretches), num_layers)
    assert_as_asked(name, table, memory, num_layers)
    placed = place(model(name, num_layers), table.placement, table=table)
    traced = trace(jax.grad(total), placed, TOKENS, asked=table)
    found = check_hlo(memory.hlo, traced, host_temp_bytes=memory.host_temp_bytes)
    assert found.ok, str(found)
    assert found.found == found.asked == sum(place == "host" for row in table.rows() for place in row.values())
    assert found.host_bytes == table.place_bytes("host")


@pytest.mark.parametrize(("name", "seed", "num_layers", "stretches"), chosen(DEEP))
def test_random_tables_of_many_segments_have_exactly_the_host_bytes(
    name: str, seed: int, num_layers: int, stretches: int
):
    placement = drawn(name, seed, num_layers, stretches)
    table, memory = gradient(name, placement, num_layers, helpers.FEWER_KERNELS)
    assert memory.host_temp_bytes == table.place_bytes("host") > 0, str(table)


def test_random_tables_are_many_and_different():
    def segments(each: tuple[str, int, int, int]) -> int:
        return resolve(drawn(*each), model(each[0], each[2]), EXAMPLE).num_segments

    assert len({str(drawn(*each)) for each in RANDOM}) == 20
    assert {segments(each) for each in RANDOM} >= {1, 2, 3}
    assert max(map(segments, DEEP)) >= 7


@pytest.mark.parametrize(("body", "names"), BODIES.values(), ids=BODIES)
def test_a_scan_of_ones_own(body: Any, names: set[str]):
    """Case 4: an activation used twice, a square one and its transpose, 3 layers of [64, 64] on the host."""
    x, w = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
    memory = compiled(jax.grad(scan_loss(body, dict.fromkeys(names, "host")), (0, 1)), x, w)
    assert memory.host_temp_bytes == len(names) * 3 * 64 * 64 * 4


@pytest.mark.parametrize("name", MODELS if helpers.LONG else ["llama"])
def test_a_whole_train_step(name: str):
    """With its own options, donation and accumulation: activations of one micro-batch on the host, state in place."""
    canonical, placement, optimizer = model(name, 2), Placement(default="host"), optax.adam(1e-3)
    half = (jax.ShapeDtypeStruct((BATCH // 2, SEQ), jnp.int32),)
    table = resolve(placement, canonical, half)
    state = jax.eval_shape(lambda placed: init_state(placed, optimizer), place(canonical, placement, table=table))
    step = make_train_step(optimizer, accumulate=2, router_bias_rate=1e-3, platform="cuda")
    with jax.numpy_dtype_promotion("standard"):
        memory = compile_for(step, state, TOKENS, target=Target.named("h200"), options=helpers.KERNELS)
    assert memory.host_temp_bytes == table.place_bytes("host")
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.alias_bytes == state_bytes
    assert state_bytes <= memory.argument_bytes <= state_bytes + BATCH * (SEQ + 1) * 4 + 2**12
    assert state_bytes + memory.temp_bytes < memory.device_peak_bytes < state_bytes + memory.temp_bytes + 2**14


def test_xla_comes_to_an_end_with_dispatched_rows(tmp_path):
    """It moved a reshape of them to and fro: 25 rounds of all simplifications, then it gave up. Now 6."""
    experts = eqx.filter_eval_shape(lambda: Experts(128, 128, 8, key=jax.random.key(0)))
    x, weights = (jax.ShapeDtypeStruct((1024, size), jnp.float32) for size in (128, 2))
    chosen = jax.ShapeDtypeStruct(weights.shape, jnp.int32)

    def loss(experts: Any, x: Any, weights: Any, chosen: Any) -> Any:
        return jnp.sum(jnp.square(experts(x, weights, chosen)[0]))

    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "reshape-mover"}
    compiled(jax.grad(loss, (0, 1, 2)), experts, x, weights, chosen, more=helpers.FEWER_KERNELS | dump)
    assert 0 < len(list(tmp_path.glob("*.simplification.after_reshape-mover.*"))) < 15


def test_the_persistent_cache_of_jax_is_left_alone(tmp_path):
    """JAX writes what it compiles for an absent device to its cache and cannot read it again."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        sizes = {compiled(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32)).output_bytes for _ in range(2)}
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert len(sizes) == 1
    assert not list(tmp_path.iterdir())
