import subprocess
import sys

import pytest

from recipes.data.config import DataConfig
from zoo.checks import ConfigError


def test_defaults_are_valid():
    assert DataConfig().source == "stdlib"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "txet"}, r"data\.source=txet(.|\n)*did you mean text"),
        ({"source": "text"}, r"data\.path=None"),
        ({"source": "text", "path": ""}, r"data\.path="),
        ({"path": "books"}, r"data\.path=books(.|\n)*data\.source=text"),
        ({"validation_fraction": 0.0}, r"data\.validation_fraction=0\.0"),
        ({"validation_fraction": 1.0}, r"data\.validation_fraction=1\.0"),
        ({"validation_fraction": float("nan")}, r"data\.validation_fraction=nan"),
        ({"seed": -1}, r"data\.seed=-1"),
    ],
)
def test_errors_name_key_and_value(fields, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**fields)


def test_imports_neither_jax_nor_hydra():
    code = "import sys, recipes.data.batches; sys.exit(bool({'jax', 'jaxlib', 'hydra'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
