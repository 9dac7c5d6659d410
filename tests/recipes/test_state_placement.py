"""The grammar of `placement.state`: what may be said, which entry wins, what is refused and with what words."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from layers.buffer import split_buffers
from recipes import Placement, StatePlacement, resolve, schema
from recipes.placement.settle import check_parts, describe, places
from recipes.placement.useful import require_gradients_of_layers, require_host_memory
from tests.recipes.common import abstract, savable_once
from tests.recipes.test_conf_files import composed
from tests.recipes.test_configuration import no_training, refusal
from zoo.checks import ConfigError

pytestmark = pytest.mark.usefixtures(savable_once.__name__)

LLAMA, DEEPSEEK = "llama_five_layers", "deepseek_nine_experts"
EXAMPLE = (jax.ShapeDtypeStruct((2, 7), jnp.int32),)


def hosted(name: str, kind: str = "params", **said: Any) -> set[tuple[str, int | None]]:
    """The last name but `weight` on the path, and the layer, of each array that is on the host."""
    tree = split_buffers(abstract(name))[0]
    where = jax.tree.leaves(places(tree, kind, StatePlacement(**said), num_layers(name)))
    each = zip(describe(tree), where, strict=True)
    return {(".".join(names[-2:]), layer) for (_, names, layer), place in each if place == "host"}


def num_layers(name: str) -> int:
    return 1 + max(layer for _, _, layer in describe(abstract(name)) if layer is not None)


# What is said of DeepSeek's parameters -> the names on the host; layer 0 is dense, layer 1 a mixture of experts.
PARTS: dict[str, tuple[Any, set[str]]] = {
    "nothing": ("device", set()),
    "a module": ({"router": "host"}, {"router.weight"}),
    "one matrix of two modules": ({"up_proj": "host"}, {"up_proj.weight", "experts.up_proj"}),
    "within a part": ({"experts": {"up_proj": "host"}}, {"experts.up_proj"}),
    "embeddings are two": ({"embeddings": "host"}, {"embedding.weight", "head.weight"}),
    "all but": (
        {"default": "host", "mlp": "device", "attention": "device", "moe": "device", "norms": "device"},
        {"embedding.weight", "head.weight"},
    ),
    "a default within a part": (
        {"experts": {"default": "host", "up_proj": "device"}},
        {"experts.gate_proj", "experts.down_proj"},
    ),
}


@pytest.mark.parametrize(("said", "names"), PARTS.values(), ids=PARTS)
def test_parts(said: Any, names: set[str]):
    assert {name for name, _ in hosted(DEEPSEEK, params=said)} == names


def test_everything_but_numbers():
    model = abstract(LLAMA)
    tree = {"count": jax.ShapeDtypeStruct((), jnp.int32), "mu": model, "nu": model}
    arrays = len(jax.tree.leaves(model))
    found = jax.tree.leaves(places(tree, "optimizer", StatePlacement(optimizer="host"), 5))
    assert found == ["device", *["host"] * (2 * arrays)]
    moments = StatePlacement(optimizer={"mu": "host", "nu": {"embedding": "host"}})
    found = jax.tree.leaves(places(tree, "optimizer", moments, 5))
    assert found == ["device", *["host"] * arrays, "host", *["device"] * (arrays - 1)]


def test_layers_win_and_of_these_the_key_that_names_fewest():
    said = {"params": {"mlp": "host"}, "layers": {"0-2": {"params": "host"}, "1": {"params": "device"}}}
    for turned in (said["layers"], dict(reversed(said["layers"].items()))):
        found = hosted(LLAMA, params=said["params"], layers=turned)
        by_layer = {layer: {name for name, other in found if other == layer} for layer in range(5)}
        assert len(by_layer[0]) == len(by_layer[2]) > len(by_layer[3]) == len(by_layer[4]) == 3
        assert by_layer[1] == set()
        assert not any(layer is None for _, layer in found)
    assert hosted(LLAMA, kind="master", layers=said["layers"]) == set()


def test_keys_of_one_size_must_agree_where_they_meet():
    layers = {"0-1": {"params": "host"}, "1-2": {"params": "device"}}
    with pytest.raises(ConfigError) as error:
        hosted(LLAMA, layers=layers)
    assert str(error.value) == (
        "placement.state.layers.1-2.params=device: layer 1 is also named by 0-1, which says host"
    )
    assert hosted(LLAMA, layers=layers | {"1": {"params": "host"}})


def test_parts_that_disagree_about_an_array():
    with pytest.raises(ConfigError) as error:
        hosted(DEEPSEEK, params={"moe": "host", "experts": "device"})
    assert str(error.value).startswith("placement.state.params.moe=host: disagrees with placement.state.params.experts")
    assert "write moe: {experts: ...} instead" in str(error.value)


# What is said -> the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no place": ({"params": "remat"}, "placement.state.params=remat: "),
    "a truth value": ({"master": True}, "placement.state.master=True: "),
    "no place of a part": ({"optimizer": {"mu": {"mlp": "hots"}}}, "placement.state.optimizer.mu.mlp=hots: "),
    "no word": ({"gradients": {3: "host"}}, "placement.state.gradients.3=host: names no part: parts are words"),
    "no layer": ({"layers": {"first": {"params": "host"}}}, "placement.state.layers=first: not a set of layers"),
    "no map": ({"layers": {"0": "host"}}, "placement.state.layers.0=host: needs a map, as {optimizer: host}"),
    "no kind": ({"layers": {"0": {"masters": "host"}}}, "did you mean master?"),
    "twice": ({"layers": {7: {"params": "host"}, "7": {"params": "host"}}}, "stands twice, as a number and as a word"),
    "no processor": ({"update": "gpu"}, "placement.state.update=gpu: "),
}


@pytest.mark.parametrize(("said", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_said(said: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        Placement(state=said)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_equal_placements_are_equal_and_can_be_keys():
    said: Any = {"params": {"mlp": "host"}, "layers": {3: {"optimizer": "host"}}}
    same = {**said, "layers": {"3": {"optimizer": "host"}}}
    assert StatePlacement(**said) == StatePlacement(**same)
    assert len({StatePlacement(**said), StatePlacement(**same), StatePlacement()}) == 2
    assert StatePlacement(**said) != StatePlacement()
    assert StatePlacement(**said).anything_on_host
    assert not StatePlacement(params={"mlp": "device"}).anything_on_host


def test_rows_of_the_state_split_segments():
    state: Any = {"optimizer": "host", "layers": {"0-1": {"optimizer": "device"}, "4": {"optimizer": "host"}}}
    table = resolve(Placement(state=state), abstract(LLAMA), EXAMPLE)
    assert table.num_segments == 2  # layers 0-1; layer 4 says what all others have
    assert resolve(Placement(state={"optimizer": "host"}), abstract(LLAMA), EXAMPLE).num_segments == 1  # type: ignore[arg-type]


# What names nothing of the model -> the message.
NOTHING = {
    "a part": ({"params": {"expert": "host"}}, "placement.state.params.expert=host: no expert in the params"),
    "the nearest": ({"params": {"expert": "host"}}, "did you mean experts?"),
    "deeper": ({"master": {"attention": {"up_prj": "host"}}}, "master.attention.up_prj=host: no up_prj"),
    "both": ({"master": {"attention": {"up_proj": "host"}}}, "no array of the master is in attention and up_proj"),
    "of layers": ({"layers": {"0": {"gradients": {"attn": "host"}}}}, "placement.state.layers.0.gradients.attn=host"),
    "layers": ({"layers": {"9": {"params": "host"}}}, "placement.state.layers=9: the model has layers 0 to 1"),
}


@pytest.mark.parametrize(("said", "message"), NOTHING.values(), ids=NOTHING)
def test_what_names_nothing_of_the_model(said: Any, message: str):
    with pytest.raises(ConfigError) as error:
        resolve(Placement(state=said), abstract(DEEPSEEK), EXAMPLE)
    assert message in str(error.value)


def test_a_moment_that_the_optimizer_has_not():
    tree = {"mu": abstract(LLAMA), "nu": abstract(LLAMA)}
    check_parts(tree, "optimizer", StatePlacement(optimizer={"mu": {"mlp": "host"}}))
    with pytest.raises(ConfigError, match="no momentum in the optimizer"):
        check_parts(tree, "optimizer", StatePlacement(optimizer={"momentum": "host"}))


def test_presets():
    zero, everything, experts = (
        Placement.preset(name).state for name in ("zero_offload", "host_all_state", "host_experts")
    )
    assert (zero.params, zero.master, zero.optimizer, zero.gradients) == ("device", "host", "host", "device")
    assert (everything.params, everything.master, everything.optimizer) == ("host", "host", "host")
    assert {name for name, _ in hosted(DEEPSEEK, params=experts.params)} == {
        "experts.gate_proj",
        "experts.up_proj",
        "experts.down_proj",
    }


def test_what_hydra_hands_over():
    said = [
        "placement.state.optimizer={mu:host,nu:device}",
        "placement.state.layers={0-1:{optimizer:host},3:{params:host}}",
    ]
    state = schema.read(composed("model=debug_llama", *said)).placement.state
    assert state == StatePlacement(
        optimizer={"mu": "host", "nu": "device"}, layers={"0-1": {"optimizer": "host"}, "3": {"params": "host"}}
    )
    over = schema.read(composed("model=debug_llama", "placement=host_all_state", "placement.state.params=device"))
    assert (over.placement.state.params, over.placement.state.master) == ("device", "host")


def test_gradients_outside_of_layers_alone_cannot_help():
    for said in ({"embeddings": "host"}, {"embedding": "host"}):
        with pytest.raises(ConfigError, match=r"(?s)cannot help: .*or set train\.accumulate above 1"):
            require_gradients_of_layers(abstract(LLAMA), StatePlacement(gradients=said))
    for said in ("device", "host", {"embeddings": "host", "mlp": "host"}):
        require_gradients_of_layers(abstract(LLAMA), StatePlacement(gradients=said))


def test_a_device_without_memory_of_its_host():
    class Memory:
        kind = "hbm"

    class Device:
        device_kind = "toy"

        def addressable_memories(self) -> list[Memory]:
            return [Memory()]

    with pytest.raises(ConfigError, match="toy has no memory of kind pinned_host, only hbm"):
        require_host_memory(Device())
    require_host_memory(jax.devices()[0])


COMMANDS = {
    "placement.state.optimizer={mu:host,nu:devise}": "placement.state.optimizer.nu=devise: ",
    "placement.state.optimizer={mo:host}": "placement.state.optimizer.mo=host: no mo in the optimizer",
    "placement.state.layers={0-1:{optimizer:hots}}": "placement.state.layers.0-1.optimizer=hots: ",
    "placement.state.layers={0-99:{optimizer:host}}": "placement.state.layers=0-99: the model has layers 0 to ",
    "placement.state.param=host": "did you mean params?",
    "placement.state.gradients={norms:device,embedding:host}": "cannot help",
}


@pytest.mark.usefixtures(no_training.__name__)
@pytest.mark.parametrize(("override", "message"), COMMANDS.items(), ids=COMMANDS)
def test_refused_on_the_command_line(override: str, message: str):
    assert message in refusal(override)
