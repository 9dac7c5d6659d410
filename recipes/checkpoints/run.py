"""The checkpoints that a run makes."""

from collections.abc import Callable
from pathlib import Path

import jax
import yaml

from recipes.checkpoints import folder as folders
from recipes.checkpoints.save import Saver
from recipes.config import Config
from recipes.data.source import Corpus
from recipes.step.state import TrainState
from zoo.checkpoint import BESIDE, write_config
from zoo.folders import Folder, copy


class Checkpoints:
    """Makes the checkpoints of a run: every `train.checkpoint_every` steps, at the end, and when asked to stop.

    `before` is called when all of one but its completion is written, in the thread that writes it.
    """

    def __init__(self, config: Config, resolved_config: str, corpus: Corpus, before: Callable[[], None] = lambda: None):
        self._corpus, self._config, self._resolved = corpus, config, yaml.safe_load(resolved_config)
        self._root, self._before, train = folders.root(config), before, config.train
        self._saver = Saver(self._root, train.keep_last, train.keep_every, self._write_config)

    def begin(self, resumes: bool) -> None:
        """Makes room: what a run left unfinished is removed, and what a new run does not go on from set aside."""
        if jax.process_index() == 0:
            folders.clean(self._root)
            if not resumes and isinstance(self._root, Path) and folders.steps(self._root):
                print(f"the checkpoints that were there are now in {folders.set_aside(self._root)}")

    def due(self, step: int, ends: bool) -> bool:
        """Whether to save after this step; `ends`: no other follows."""
        every = self._config.train.checkpoint_every
        return bool(every) and (ends or step % every == 0)

    def save(self, state: TrainState, step: int) -> Folder:
        """Has the state written, see `Saver.save`."""
        return self._saver.save(state, step)

    def wait(self) -> None:
        """Until all is written."""
        self._saver.wait()

    def _write_config(self, folder: Folder, step: int) -> None:
        if self._corpus.tokenizer_file is not None:
            copy(self._corpus.tokenizer_file, folder / BESIDE)
        training = {
            "version": folders.VERSION,
            "step": step,
            "data": self._corpus.fingerprint,
            "config": self._resolved,
        }
        self._before()
        write_config(folder, self._config.model, training=training)
