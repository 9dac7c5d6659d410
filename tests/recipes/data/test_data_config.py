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
        ({"readers": -1}, r"data\.readers=-1"),
        ({"max_malformed": -1}, r"data\.max_malformed=-1"),
        ({"source": "jsonl"}, r"data\.path=None"),
        ({"field": "body"}, r"data\.field=body: data\.source=stdlib does not read it\ndata\.source=mix or jsonl does"),
        ({"prompt_field": "question"}, r"data\.prompt_field=question: data\.source=stdlib"),
        ({"validation_path": "books"}, r"data\.validation_path=books: data\.source=stdlib"),
        ({"mix": {"a": {"path": "b"}}}, r"data\.mix=(.|\n)*data\.source=mix does"),
        ({"separator": "</s>", "tokenizer": "bytes"}, r"data\.separator=</s>"),
    ],
)
def test_errors_name_key_and_value(fields, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**fields)


PROGRAM = """
import sys
from recipes.data.batches import train_batches
from recipes.data.config import DataConfig
from recipes.data.source import load
config = DataConfig()
train_batches(config, load(config, 256), sequence_length=256, vocab_size=256).batch(0, 8)
print(*sorted({"jax", "jaxlib", "hydra", "grain", "tokenizers", "orbax"} & set(sys.modules)))
"""


def test_the_standard_library_needs_none_of_the_heavy_packages():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
