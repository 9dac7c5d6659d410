"""Benchmarks measure the machine code that users get, whatever the tests around them compile."""

import jax
import pytest


@pytest.fixture(autouse=True)
def optimised():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
