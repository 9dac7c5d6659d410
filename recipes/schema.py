"""The configuration as Hydra sees it: every group has a schema, so that a wrong key or type is an error."""

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from typing import Any, get_args, get_origin

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from recipes.config import Config, EvalConfig, EvalRunConfig, ExportConfig, ImportConfig, RunConfig, TrainConfig
from recipes.data.config import DataConfig
from recipes.optim import OptimizerConfig
from recipes.placement.spec import Placement, StatePlacement
from recipes.plan.config import PlanConfig, PlanRunConfig
from recipes.plan.targets import Target
from recipes.sharding.config import MeshConfig
from recipes.verify.config import VerifyConfig, VerifyRunConfig
from zoo import presets
from zoo.checks import ConfigError, from_fields
from zoo.registry import FAMILIES

PLAN_SECTIONS = ("target", "plan", "compare")
SECTIONS = ("model", "placement", "mesh", "optimizer", "data", "train", "run")
GROUPS = {"mesh": MeshConfig, "optimizer": OptimizerConfig, "data": DataConfig, "target": Target}


def register() -> None:
    """Tells Hydra the schemas that the files under `conf/` name in their defaults."""
    store = ConfigStore.instance()
    for family, kind in FAMILIES.items():
        store.store(group="family", name=family, node=_schema(kind))
    for name, kind in GROUPS.items():
        store.store(group="schema", name=name, node=_schema(kind))
    store.store(group="schema", name="data", node=_open(_schema(DataConfig), "mix"))
    store.store(group="schema", name="placement", node=_placement_schema())
    root: dict[str, Any] = dict.fromkeys(("model", "placement", "mesh", "optimizer", "data"), MISSING)
    for name, kind in {"import": ImportConfig, "export": ExportConfig}.items():
        store.store(name=f"{name}_schema", node=_schema(kind))
    evaluation = {**OmegaConf.to_container(_schema(EvalConfig)), "data": MISSING, "run": _schema(EvalRunConfig)}  # type: ignore[dict-item]
    store.store(name="eval_schema", node=evaluation)
    root |= {"train": _schema(TrainConfig)}
    run = {**root, "accept": None}
    store.store(name="schema", node={**run, "verify": "trace", "run": _schema(RunConfig)})
    planned = {
        "target": MISSING,
        "plan": _open(_schema(PlanConfig), "options"),
        "compare": [],
        "run": _schema(PlanRunConfig),
    }
    store.store(name="plan_schema", node={**root, **planned})
    checks = {**OmegaConf.to_container(_schema(VerifyConfig)), "target": None, "run": _schema(VerifyRunConfig)}  # type: ignore[dict-item]
    store.store(name="verify_schema", node={**run, **checks})


def read(tree: DictConfig) -> Config:
    """The configuration as frozen dataclasses. Raises ConfigError where a value cannot be."""
    fields = _fields(tree)
    checks = {"verify": _word(fields.pop("verify")), "accept": fields.pop("accept")}
    _require_sections(fields, SECTIONS)
    config = _config(tree, fields, from_fields(RunConfig, fields["run"], "run"))
    return dataclasses.replace(config, **checks)


def read_plan(tree: DictConfig) -> tuple[Config, Target, PlanConfig, PlanRunConfig, tuple[str, ...]]:
    """The configuration of `zoo-plan`: that of a run, the target with the mesh's devices, and what to compare.

    Raises ConfigError where a value cannot be, or the mesh does not fit the target.
    """
    fields = _fields(tree)
    _require_sections(fields, (*SECTIONS, *PLAN_SECTIONS), lists=("compare",))
    run = from_fields(PlanRunConfig, fields["run"], "run")
    config = _config(tree, fields, RunConfig(dir=run.dir or "runs/planned"))
    target = _target(fields["target"], config)
    compare = tuple(fields["compare"])
    for name in compare:
        if name not in Placement.presets():
            raise ConfigError("compare", name, "no such placement", allowed=Placement.presets())
    return config, target, from_fields(PlanConfig, fields["plan"], "plan"), run, compare


def read_verify(tree: DictConfig) -> tuple[Config, Target | None, VerifyConfig, VerifyRunConfig]:
    """The configuration of `zoo-verify`: that of a run, the target if there is one, and how much is checked.

    Raises ConfigError where a value cannot be.
    """
    fields = _fields(tree)
    accept, target = fields.pop("accept"), fields.pop("target")
    names = [field.name for field in dataclasses.fields(VerifyConfig)]
    options = from_fields(VerifyConfig, {name: fields.pop(name) for name in names}, "")
    _require_sections(fields, SECTIONS)
    run = from_fields(VerifyRunConfig, fields["run"], "run")
    config = _config(tree, fields, RunConfig(dir=run.dir or "runs/verified", compile_cache=run.compile_cache))
    found = None if target is None else _target(target, config)
    return dataclasses.replace(config, accept=accept), found, options, run


def _target(fields: Mapping[str, Any], config: Config) -> Target:
    """The target with the mesh's devices; ConfigError if it names another number of them."""
    target, devices = from_fields(Target, fields, "target"), config.mesh.num_devices
    if target.devices == 1 and target.topology is None:
        target = target.of(devices)
    if target.devices != devices:
        problem = f"the mesh has {devices}: its axes must multiply to the number of devices"
        raise ConfigError("target.devices", target.devices, problem, hint=f"mesh.fsdp={target.devices}, for instance")
    return target


def _word(value: Any) -> str:
    """`true`, `trace` or `false`, which YAML reads as a boolean or a word."""
    return str(value).lower() if isinstance(value, bool) else value


def _require_sections(fields: Mapping[str, Any], sections: tuple[str, ...], lists: tuple[str, ...] = ()) -> None:
    """Raises ConfigError unless the fields are those sections, maps or `lists`."""
    for section, given in fields.items():
        if section not in sections:
            key, value = _first_leaf(section, given)
            raise ConfigError(key, value, "no such key", allowed=sections, name=section)
    for section in sections:
        if section in lists and not isinstance(fields.get(section), list):
            raise ConfigError(section, fields.get(section), "needs a list, such as [device,host]")
        if section not in lists and not isinstance(fields.get(section), dict):
            raise ConfigError(section, fields.get(section), "needs a map of keys to values, or a choice of its group")


def _config(tree: DictConfig, fields: dict[str, Any], run: RunConfig) -> Config:
    family = getattr(OmegaConf.get_type(tree.model), "__name__", "")
    kinds = {kind.__name__: kind for kind in FAMILIES.values()}
    if family not in kinds:
        raise ConfigError("model", "", "needs a choice of its group", allowed=presets.names("model"))
    explain = fields["placement"].pop("explain")
    if not isinstance(explain, bool):
        raise ConfigError("placement.explain", explain, "must be true or false")
    config = Config(
        model=from_fields(kinds[family], fields["model"], "model"),
        placement=from_fields(Placement, fields["placement"], "placement"),
        explain=explain,
        mesh=from_fields(MeshConfig, fields["mesh"], "mesh"),
        optimizer=from_fields(OptimizerConfig, fields["optimizer"], "optimizer"),
        data=from_fields(DataConfig, fields["data"], "data"),
        train=from_fields(TrainConfig, fields["train"], "train"),
        run=run,
    )
    config.mesh.require_processes(getattr(config.train.distributed, "processes", None) or 1)
    config.mesh.require_batch(config.train.batch_size, config.train.sequence_length, config.train.accumulate)
    config.mesh.require_heads(config.model)
    return config


def read_command(tree: DictConfig, kind: type) -> Any:
    """The configuration of a command that has no groups. Raises ConfigError where a value cannot be."""
    return from_fields(kind, _fields(tree), "")


def read_eval(tree: DictConfig) -> tuple[EvalConfig, DataConfig, EvalRunConfig]:
    """The configuration of `zoo-eval`. Raises ConfigError where a value cannot be."""
    fields = _fields(tree)
    data, run = fields.pop("data"), fields.pop("run")
    return (
        from_fields(EvalConfig, fields, ""),
        from_fields(DataConfig, data, "data"),
        from_fields(EvalRunConfig, run, "run"),
    )


def _fields(tree: DictConfig) -> dict[str, Any]:
    missing = sorted(OmegaConf.missing_keys(tree))
    if missing:
        raise ConfigError(missing[0], "???", "has no value; give it on the command line or in a file")
    return OmegaConf.to_container(tree, resolve=True)  # type: ignore[return-value]


def _first_leaf(key: str, value: Any) -> tuple[str, Any]:
    """`("lora", {"rank": 2})` as `("lora.rank", 2)`."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key, value


def _placement_schema() -> DictConfig:
    """Tags and layers become keys without `+`: `recipes.resolve` checks them when the model is known."""
    explained = dataclasses.make_dataclass(
        "Placement",
        [
            ("default", str, "remat"),
            ("activations", dict[str, Any], field(default_factory=dict)),
            ("layers", dict[Any, Any], field(default_factory=dict)),
            ("state", _twin(StatePlacement), field(default_factory=_twin(StatePlacement))),
            ("group", int, 1),
            ("explain", Any, False),
        ],
    )
    # Of `state` the maps of parts: `from_fields` refuses other fields.
    return _open(OmegaConf.structured(explained), "activations", "layers", "state")


def _open(node: DictConfig, *names: str) -> DictConfig:
    """The schema with maps that take any key without `+`."""
    for name in names:
        OmegaConf.set_struct(node[name], False)
    return node


def _schema(kind: type) -> DictConfig:
    return OmegaConf.structured(_twin(kind))


@cache
def _twin(kind: type) -> type:
    """A dataclass of the same name and fields that is not frozen and checks nothing.

    OmegaConf takes a frozen dataclass for a configuration that no one may override, and any number for a truth value:
    `from_fields` checks those.
    """
    fields = []
    for item in dataclasses.fields(kind):
        nested: Any = _twin(item.type) if dataclasses.is_dataclass(item.type) else item.type  # type: ignore[arg-type]
        open_type = get_origin(nested) in (tuple, Mapping) or _is_choice_of_map(nested)
        nested = Any if nested is bool or open_type else nested
        default: Any = MISSING if item.default is dataclasses.MISSING else item.default
        if item.default_factory is dict:
            default = field(default_factory=dict)
        elif item.default_factory is not dataclasses.MISSING:
            values = dataclasses.asdict(item.default_factory())  # type: ignore[call-overload]
            default = field(default_factory=lambda nested=nested, values=values: nested(**values))
        fields.append((item.name, nested, default))
    return dataclasses.make_dataclass(kind.__name__, fields)


def _is_choice_of_map(kind: Any) -> bool:
    """Whether a field takes a map or something else, which OmegaConf cannot express."""
    return any(dataclasses.is_dataclass(each) or get_origin(each) is Mapping for each in get_args(kind))
