"""From places to a `jax.checkpoint` policy."""

from collections.abc import Callable, Mapping

import jax

from recipes.placement.spec import require_place


def policy(places: Mapping[str, str]) -> Callable:
    """A plain `jax.checkpoint` policy that saves each named activation on its place: `device`, `host` or `remat`.

    Names that are absent are recomputed, as those under `remat`. Usable around any function whose activations carry
    names, such as the body of one's own scan:

        jax.lax.scan(jax.checkpoint(body, policy=recipes.policy({"attn_query": "host"}), prevent_cse=False), x, blocks)

    Raises ConfigError for another word than these three. A name that no activation carries cannot be seen here:
    `recipes.resolve` checks names against a model.
    """
    for name, place in places.items():
        require_place(f"policy[{name}]", place)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, place in places.items() if place == "device"],
        names_which_can_be_offloaded=[name for name, place in places.items() if place == "host"],
        offload_src="device",
        offload_dst="pinned_host",
    )
