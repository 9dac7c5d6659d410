"""Tags: names for activations, so that a recipe can say where each of them lives.

A tag is a field of a module, typed by the array it names:

    class Hidden(eqx.Module):
        up: Linear
        hidden: Tag[Float[Array, "*batch dim"]] = tag()

        def __init__(self, dim, *, prefix="mine", key):
            self.up = Linear(dim, 4 * dim, key=key)
            name_tags(self, prefix)

        def __call__(self, x):
            return jax.nn.relu(self.hidden(self.up(x)))

`name_tags` gives the instance's tag its full name, `mine_hidden`. A tag is a PyTree node without leaves, so walking a
model yields its tags; no registry exists. Tag what the backward pass *reads*: a value that no derivative rule reads
cannot be saved usefully, wherever it is placed.
"""

import dataclasses
from typing import Any, get_args, get_origin, no_type_check

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from layers.nodes import map_nodes


class Tag[A](eqx.Module):
    """A named activation. Calling it marks an array with the name and checks the array against the annotation.

    - `name`: the full name, `<prefix>_<field>`.
    - `array`: the jaxtyping annotation of the array.
    - `carried`: the array is the block's own input, which any checkpointed block saves anyway.
    - `follows`: full name of the tag whose place this one shares (the log-sum-exp follows the attention context).
    - `fenced`: the compiler may not merge what reads the array with what brings it back.
    """

    name: str = eqx.field(static=True)
    array: Any = eqx.field(static=True)
    carried: bool = eqx.field(static=True, default=False)
    follows: str | None = eqx.field(static=True, default=None)
    fenced: bool = eqx.field(static=True, default=False)

    # Unchecked itself, so that the dims below are compared with those of the *calling* function.
    @no_type_check
    def __call__(self, x):
        """Marks `x` with the name; the value is unchanged. Raises TypeError if it does not fit the annotation."""
        if not isinstance(x, self.array):
            raise TypeError(f"tag {self.name} names {self.array.__name__}, not an array of {x.dtype}{list(x.shape)}")
        x = checkpoint_name(x, self.name)
        return jax.lax.optimization_barrier(x) if self.fenced else x

    @property
    def discrete(self) -> bool:
        """Whether the array holds decisions (no floats): recomputing these may choose differently, so they are kept."""
        dtypes = self.array.dtypes
        return isinstance(dtypes, tuple) and all(dtype.startswith(("int", "uint", "bool")) for dtype in dtypes)


def tag(*, carried: bool = False, follows: str | None = None) -> Any:
    """A field that holds a `Tag`; `name_tags` fills it. `follows` is the sibling field whose place this one shares."""
    return eqx.field(init=False, metadata={"tag": {"carried": carried, "follows": follows}})


def name_tags(module: eqx.Module, prefix: str) -> None:
    """Fills the tag fields of a module under construction: field `query` under prefix `attn` becomes `attn_query`."""
    for field in dataclasses.fields(module):
        if "tag" in field.metadata:
            options = dict(field.metadata["tag"])
            if options["follows"] is not None:
                options["follows"] = f"{prefix}_{options['follows']}"
            setattr(module, field.name, Tag(f"{prefix}_{field.name}", _named_array(field), **options))


def tags(tree: PyTree) -> tuple[Tag, ...]:
    """The distinct tags of a PyTree of modules, in order of appearance."""
    found = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Tag))
    return tuple({node.name: node for node in found if isinstance(node, Tag)}.values())


def fence(tree: PyTree) -> PyTree:
    """The modules with every tag fenced."""
    return map_nodes(lambda tag: dataclasses.replace(tag, fenced=True), tree, Tag)


def _named_array(field: dataclasses.Field) -> Any:
    """The `X` of an annotation `Tag[X]` or `Tag[X] | None`."""
    for kind in (field.type, *get_args(field.type)):
        if get_origin(kind) is Tag:
            return get_args(kind)[0]
    raise TypeError(f"field {field.name} = tag() needs an annotation Tag[...], got {field.type}")
