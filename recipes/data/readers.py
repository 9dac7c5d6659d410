"""Processes that read beside the one that trains."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from zoo.checks import ConfigError


@contextmanager
def processes(readers: int) -> Iterator[Callable]:
    """A `map` over so many processes, in order. Raises ConfigError if one of them is killed."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(readers, context, initializer=prepare_reader) as pool:
        try:
            yield pool.map
        except BrokenProcessPool as error:
            problem = "one of these processes was killed; was there too little memory?"
            raise ConfigError("data.readers", readers, problem) from error
        finally:
            pool.shutdown(cancel_futures=True)


def prepare_reader() -> None:
    """In a reader process: one thread, Ctrl-C left to the process that started it, no life after that one's."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
