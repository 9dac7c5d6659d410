"""What cannot be configured ends with exit code 2 and a few lines that name it."""

import contextlib
import dataclasses
import functools
import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, cast, get_args, get_type_hints

import pytest
from hydra._internal.hydra import Hydra
from hypothesis import given, settings, strategies as st

import conf
import zoo
from recipes import loop, schema
from recipes.cli.launch import launch
from recipes.cli.train import main
from recipes.data import files
from tests import helpers
from tests.recipes.common import savable_once

pytestmark = pytest.mark.usefixtures(savable_once.__name__)

CONF = Path(conf.__file__).parent
CHOICES = sorted((file.parent.name, file.stem) for file in CONF.glob("*/*.yaml"))


@pytest.fixture(scope="module")
def no_training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A `zoo-train` that fails the test where it would begin to train, and does nothing twice until there."""
    folder = tmp_path_factory.mktemp("no_training")

    def begin(*_: object) -> NoReturn:
        raise AssertionError("the configuration was accepted")

    schema.register()
    texts = tmp_path_factory.mktemp("texts")
    for name in "abcdefgh":
        (texts / name).write_text("tokens " * 1000)
    corpus = files.find("data.path", str(texts), "text")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HYDRA_FULL_ERROR", "1")  # so that the launcher's own setting is undone afterwards
        patch.setattr(schema, "register", lambda: None)
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # composes everything to find one key, which is null
        patch.setattr(files, "stdlib", lambda: corpus)
        patch.setattr(zoo, "abstract", functools.cache(zoo.abstract))
        patch.setattr(loop.Setup, "drawn_state", begin)
        yield
    assert list(folder.iterdir()) == []


def refusal(*overrides: str) -> str:
    """What `zoo-train` writes to stderr as it ends with exit code 2.

    In a thread of its own: as deep in Python's stack as Hypothesis calls, each call would map new memory for it
    thousands of times, which takes a third of the test's time.
    """
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["zoo-train", "run.compile_cache=null", *overrides])
        with ThreadPoolExecutor(1) as thread, pytest.raises(SystemExit) as stop:
            thread.submit(main).result()
    assert (stop.value.code, out.getvalue()) == (2, "")
    return err.getvalue()


REFUSED = {  # overrides -> what the message says; beyond what test_cli.py has
    "model.router.groups=1 model.router.groups_kept=1 model.experts_per_token=9": "experts_per_token=9: only 8 experts",
    "model.router.groups=3": "model.num_experts=8: must be divisible by router.groups=3",
    "model.router.groups_kept=5": "model.router.groups_kept=5: only 4 groups exist",
    "model.rope_head_dim=15": "model.rope_head_dim=15: must be even",
    "model=debug_llama model.rope.original_length=0 model.rope.scaling=yarn": "original_length=0: yarn scaling needs",
    "model=debug_llama model.router.groups=2": "model.router.groups=2: no such key",
    "model=debug_llama placement.activations.moe_gate=host": "did you mean mlp_gate",
    "~model +model.dim=3": "needs a choice of its group",
    "model=null": "model=null: no such choice\nallowed: bench_deepseek",
    "placement=host =3": "override==3: not of the form KEY=VALUE",
    "train.steps=7 +experiment=debug_llama": "experiment=debug_llama: Multiple values for experiment",
    "+lora.rank=2": "lora.rank=2: no such key\nallowed: model, placement",
    "mesh.fsdp=3": "a micro-batch of 8 sequences is not divisible by replica x fsdp x expert = 3",
    "mesh.tensor=3": "mesh.tensor=3: does not divide model.num_heads=4",
    "mesh.context=3": "train.sequence_length=256: is not divisible by mesh.context=3",
    "mesh.expert=16 train.batch_size=16": "mesh.expert=16: does not divide model.num_experts=8",
    "mesh.slices=2 mesh.tensor=2": "mesh.slices=2: does not divide replica x fsdp = 1 x 1",
    "mesh.zero=4": "mesh.zero=4: must be 1, 2 or 3",
    "mesh.fsdp=2 train.distributed={processes:4}": "the mesh has 2 devices (fsdp=2), which 4 processes cannot share",
    "train.distributed={coordinator:host}": "distributed.coordinator=host: must be of the form HOST:PORT",
    "train.distributed={processes:2,index:2}": "train.distributed.index=2: must be from 0 to 1",
    "train.distributed={proceses:2}": "did you mean processes?",
    "train.resume=allways": "train.resume=allways: is not one of the allowed words",
    "train.resume=must run.dir=nowhere": "train.resume=must: nowhere/checkpoints holds no checkpoint",
    "run.dir=gs://bucket/run": "run.dir=gs://bucket/run: must be a folder of a mounted file system, not an address\n"
    "train.checkpoint_dir takes one",
    "train.checkpoint_dir=ftp://bucket/run": "train.checkpoint_dir=ftp://bucket/run: is at no known kind of store, ftp",
    "train.init_from=s3://bucket": "train.init_from=s3://bucket: needs a path within the bucket",
    "train.keep_last=0": "train.keep_last=0: must be above zero",
    "train.distributed=slurm": "train.distributed=slurm: is not one of the allowed words",
    "mesh.fdsp=2": "did you mean fsdp?",
    "train.seed=4294967296": "train.seed=4294967296: must be at most 4294967295",
    "train.z_loss=nan": "train.z_loss=nan: must be a finite number",
    "data.document_mask=3": "data.document_mask=3: must be of type bool",
    "run.dir=/dev/null/a": "run.dir=/dev/null/a: cannot be made: /dev/null is not a folder",
}


@pytest.mark.usefixtures(no_training.__name__)
@pytest.mark.parametrize(("overrides", "words"), REFUSED.items(), ids=REFUSED)
def test_refused_before_anything_is_compiled(overrides: str, words: str):
    assert words in refusal(*overrides.split())


def test_of_several_jobs_the_worst_exit_code_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["zoo-train", "--multirun", "train.steps=0,1"])
    with pytest.raises(SystemExit) as stop:
        launch("zoo-train", lambda tree: 0 if schema.read(tree) else 1)
    assert stop.value.code == 2


def leaves(kind: type, prefix: str) -> Iterator[tuple[str, set[type]]]:
    """Each key below a section, with the types that it takes; maps of tags and layers left out."""
    for name, wanted in get_type_hints(kind).items():
        types = set(get_args(wanted)) if type(None) in get_args(wanted) else {wanted}
        if dataclasses.is_dataclass(wanted):
            yield from leaves(cast(type, wanted), f"{prefix}.{name}")
        elif types <= {int, float, bool, str, type(None)}:
            yield f"{prefix}.{name}", types


KINDS = get_type_hints(schema.Config) | {"model": zoo.DeepSeekConfig}
KEYS = {key: types for section in schema.SECTIONS for key, types in leaves(KINDS[section], section)}
TAGS = "attn_query attn_kv_latent_normed attn_context mlp_gate moe_gate moe_chosen shared_up block_input".split()
KNOWN = {"hydra", *TAGS, *(word for choice in CHOICES for word in choice)}
KNOWN |= {part for key in KEYS for part in key.split(".")}

NOT_A = {  # what a key of this type does not take
    int: ["abc", "1.5", "1e3", "nan", "inf", "true", "[1]", "{a:1}", "''", "null", "1__0", "${nothing}", "${model}"],
    float: ["abc", "nan", "inf", "-inf", "1e999", "true", "[1.0]", "{a:1}", "''", "null", "${train}"],
    bool: ["maybe", "3", "0.5", "on", "off", "[true]", "{a:1}", "''", "null"],
    str: ["[a]", "{a:1}", "null", "${nothing}", "${oc.env:ZOO_NO_SUCH_VARIABLE}"],
}
MAY_BE_ZERO = "num_dense_layers num_shared_experts num_mtp_layers seed validation_batches sample_tokens".split()
MAY_BE_ZERO += "checkpoint_every keep_every validate_every".split()
NO_PLACES = "off on no yes none true false null 3 offload cpu Host devise [host] {a:host}".split()
NO_LAYERS = "first -1 1- 1+ + 1--2 1.5 true a-b LAST last-0 0-1-2 4 0+9 0-99 5-2 3-0 3-last-3".split()
BROKEN = "KEY KEY=[1 KEY=[1, KEY={a KEY={a: KEY=( KEY='a KEY=\"a KEY=${ KEY=] KEY=} KEY=f(1) KEY=int(a) KEY=1,2".split()
BROKEN += "=KEY .KEY=1 KEY.=1 KEY..=1 KEY==1 KEY=a=b KEY:1 +KEY @KEY=1 ~~KEY ?KEY=1 = +=1 ~ KEY=range(1,3)".split()


@st.composite
def misspelt(draw: st.DrawFn, word: str) -> str:
    """The word with a letter dropped, doubled, swapped with the next or replaced."""
    at = draw(st.integers(0, len(word) - 1))
    head, tail = word[:at], word[at:]
    changed = [head + tail[1:], head + tail[0] + tail, head + tail[1:2] + tail[0] + tail[2:], f"{head}x{tail[1:]}"]
    return draw(st.sampled_from(changed).filter(lambda word: word.isidentifier() and word not in KNOWN))


@st.composite
def wrong_value(draw: st.DrawFn) -> str:
    key = draw(st.sampled_from(sorted(KEYS)))
    kinds = KEYS[key] - {type(None)}
    values = st.sampled_from([word for kind in kinds for word in NOT_A[kind] if kinds == KEYS[key] or word != "null"])
    if int in kinds:
        least = 0 if key.rpartition(".")[2] in MAY_BE_ZERO else 1
        values |= st.integers(-(2**70), least - 1).map(str) | st.integers(2**63, 2**99).map(str)
    return f"{key}={draw(values)}"


@st.composite
def wrong_key(draw: st.DrawFn) -> str:
    parts = draw(st.sampled_from(sorted(KEYS))).split(".")
    at = draw(st.integers(0, len(parts) - 1))
    parts[at] = draw(misspelt(parts[at]))
    return f"{draw(st.sampled_from(['', '+', '++', '~']))}{'.'.join(parts)}=1"


@st.composite
def wrong_choice(draw: st.DrawFn) -> str:
    group, option = draw(st.sampled_from(CHOICES))
    options = misspelt(option) | st.sampled_from(["null", "3", "true", "[a,b]", "''", "../config", f"{option}/"])
    return draw(st.sampled_from([f"{group}={draw(options)}", f"{draw(misspelt(group))}={option}"]))


@st.composite
def wrong_cell(draw: st.DrawFn) -> str:
    """An entry of a placement whose tag, place or layers cannot be."""
    tag, place, layers = draw(st.sampled_from(TAGS)), "host", draw(st.sampled_from(["1", "2-3", "1+3", "last"]))
    match draw(st.sampled_from(["tag", "place", "layers"])):
        case "tag":
            tag = draw(misspelt(tag))
        case "place":
            place = draw(st.sampled_from(NO_PLACES))
        case "layers":
            return f"placement.layers={{{draw(st.sampled_from(NO_LAYERS))}:{{{tag}:{place}}}}}"
    spots = [f"activations.{tag}={place}", f"activations={{{tag}:{place}}}", f"layers={{{layers}:{{{tag}:{place}}}}}"]
    return f"placement.{draw(st.sampled_from(spots))}"


sizes = st.integers(1, 99)
odd = sizes.map(lambda n: 2 * n + 1)
no_divisor_of_8 = sizes.filter(lambda n: 8 % n != 0)
below_one = st.integers(-99, 0)
UNFIT = {  # what ends with a number -> the numbers that do not go with it, or not at all
    "model.experts_per_token=": st.integers(5, 99) | st.just(1),
    "model.router.groups=1 model.router.groups_kept=1 model.experts_per_token=": st.integers(9, 99),
    "model.router.groups=": no_divisor_of_8,
    "model.router.groups_kept=": st.integers(5, 99),
    "model.num_experts=": sizes.filter(lambda n: n % 4 != 0),
    "model.num_dense_layers=": st.integers(5, 99),
    "model.rope_head_dim=": odd,
    "model=debug_llama model.head_dim=": odd,
    "model=debug_llama model.num_kv_heads=": sizes.filter(lambda n: 4 % n != 0),
    "model.rope.theta=": below_one,
    "model.rope.beta_fast=": below_one,
    "model.rope.beta_slow=": below_one,
    "optimizer.beta1=": sizes,
    "model.rope.scaling=yarn model.rope.original_length=": below_one,
    "model.rope.scaling=llama3 model.rope.original_length=": below_one,
    "train.accumulate=": no_divisor_of_8,
    "train.steps=": st.integers(2**31, 2**63),
    "train.seed=": st.integers(2**32, 2**63),
    "optimizer.learning_rate=": below_one,
    "data.validation_fraction=": sizes,
    "data.path=": sizes,
    "data=text data.path=no/such/": sizes,
    "+lora.rank=": sizes,
}


@st.composite
def wrong_number(draw: st.DrawFn) -> str:
    words = draw(st.sampled_from(sorted(UNFIT)))
    return f"{words}{draw(UNFIT[words])}"


broken = st.builds(lambda shape, key: shape.replace("KEY", key), st.sampled_from(BROKEN), st.sampled_from(sorted(KEYS)))
harmless = st.sampled_from(["", "experiment=debug_deepseek", "placement=host", "train.steps=7 optimizer.eps=1e-6"])
malformed = wrong_value() | wrong_key() | wrong_choice() | wrong_cell() | wrong_number() | broken


@pytest.mark.usefixtures(no_training.__name__)
@settings(max_examples=300 if helpers.LONG else 100)
@given(harmless, malformed)
def test_a_malformed_configuration_ends_with_a_few_lines_that_name_it(before: str, wrong: str):
    message = refusal(*before.split(), *wrong.split())
    assert len(message.splitlines()) <= 6
    assert "Traceback" not in message
    culprit = wrong.split()[-1]
    key, _, value = culprit.lstrip("+~").partition("=")
    # The whole, the key, the part of it that is wrong already, or what another key's value does not go with.
    names = [culprit, key or value, f"{key.rpartition('.')[0] or key}=", f"{key.partition('.')[2]}={value}"]
    assert any(name in message.splitlines()[0] for name in names)
    assert not message.startswith("zoo-train: configuration=")
