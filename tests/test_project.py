"""The architecture, held by tests: who imports whom, how long a file may grow, what the core depends on."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("layers", "zoo", "recipes")
CORE = {"jax", "jaxlib", "equinox", "optax", "jaxtyping", "einops", "hydra-core"}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50

# Module -> the sources that may import it; a folder ends with a slash.
HOMES = {
    "zoo": ("zoo/", "recipes/"),
    "recipes": ("recipes/",),
    "hydra": ("recipes/cli/", "recipes/schema.py"),
    "omegaconf": ("recipes/cli/", "recipes/schema.py"),
    "optax": ("recipes/",),
}


def sources(*folders: str) -> list[str]:
    """The Python files of `folders`, as paths from the root."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def parse(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"), source)


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a file names: in import statements, under TYPE_CHECKING too, and as strings like `zoo.base`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Constant(value=str(text)) if re.fullmatch(r"[a-z]\w*(\.\w+)+", text):
                yield text


def names(tree: ast.Module) -> Iterator[str]:
    """Every identifier that a file uses, be it bare, an attribute or imported."""
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.alias():
                yield node.name.rpartition(".")[2]


def test_packages_are_found():
    assert all(sources(package) for package in PACKAGES)


@pytest.mark.parametrize("source", sources(*PACKAGES))
def test_imports_keep_their_direction(source: str):
    roots = {module.partition(".")[0] for module in imported(parse(source))}
    strays = [root for root in sorted(roots & HOMES.keys()) if not source.startswith(HOMES[root])]
    assert not strays, f"{source} may not import {strays}; homes are {[HOMES[root] for root in strays]}"


def test_only_the_tag_calls_checkpoint_name():
    callers = [source for source in sources(*PACKAGES) if "checkpoint_name" in names(parse(source))]
    assert callers == ["layers/tag.py"]


@pytest.mark.parametrize("source", sources(*PACKAGES, "tests"))
def test_files_and_functions_stay_short(source: str):
    lines = (ROOT / source).read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{source} has {lines} lines: one concept a file"
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{source}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str):
    assert (ROOT / package / "py.typed").is_file()


WITHOUT_HYDRA = """
import sys
for name in ("hydra", "omegaconf", "yaml", "rich", "matplotlib", "hypothesis"):
    sys.modules[name] = None
import jax, jax.numpy as jnp, optax, recipes, recipes.verify, zoo
config = zoo.LlamaConfig(vocab_size=5, dim=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=3)
model, placement = zoo.build(config, key=jax.random.key(0)), recipes.Placement(layers={"1": {"mlp_up": "host"}})
print(recipes.resolve(placement, model))
state = recipes.init_state(recipes.place(model, placement), optax.sgd(1e-2))
state, metrics = recipes.make_train_step(optax.sgd(1e-2))(state, {"tokens": jnp.ones((1, 4), jnp.int32)})
assert jnp.isfinite(metrics["loss"])
"""


def test_the_library_works_without_hydra_and_what_comes_with_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT_HYDRA], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_core_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.split(r"[^\w-]", dependency)[0] for dependency in project["dependencies"]]
    assert sorted(found) == sorted(CORE)


def test_lock_names_one_index_and_one_host_of_files():
    lock = (ROOT / "uv.lock").read_text(encoding="utf-8")
    assert len(set(re.findall(r'registry = "([^"]*)"', lock))) == 1
    assert len(set(re.findall(r'url = "(\w+://[^/"]*)', lock))) == 1


@pytest.mark.parametrize("package", ["zoo", "recipes"])
def test_import_does_not_load_jax(package: str):
    code = f"import sys, {package}; print(*sorted({{'jax', 'jaxlib', 'equinox', 'optax'}} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
