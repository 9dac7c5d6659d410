"""The batches of a run one after another, read ahead while the device computes."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Int64

from recipes.data.batches import Batches
from recipes.data.sequences import Arrays

AHEAD = 2  # batches that wait on the device for their step


@contextmanager
def rows(
    batches: Batches, cursor: int, count: int, batch_size: int, mine: Int64[np.ndarray, " rows"], readers: int
) -> Iterator[Iterator[Arrays]]:
    """The rows `mine` of `count` batches from `cursor` on, read by so many processes; by the caller if there are none.

    What they hold does not depend on `readers`.
    """

    def read(number: int) -> Arrays:
        return batches.read(cursor + number * batch_size + mine)

    if not readers or not count:
        yield map(read, range(count))
        return
    import grain.experimental  # imports jax
    from absl import flags

    if not flags.FLAGS.is_parsed():  # by an absl program; grain's workers ask
        flags.FLAGS.mark_as_parsed()
    one = grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)
    piped = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)  # what waits in shared memory is left there
    numbers = grain.MapDataset.range(count).map(read).to_iter_dataset(one)
    options = grain.MultiprocessingOptions(num_workers=readers, per_worker_buffer_size=AHEAD)
    reading: Any = iter(
        grain.experimental.WithOptionsIterDataset(numbers, piped).mp_prefetch(options, worker_init_fn=_prepare)
    )
    try:
        yield reading
    finally:
        reading.close()


@contextmanager
def ahead(batches: Iterator, put: Callable[[Any], Any]) -> Iterator[Iterator]:
    """`put` of each batch, done by a thread for up to `AHEAD` batches before they are asked for."""
    with ThreadPoolExecutor(1, "data") as thread:
        pending: deque = deque()

        def make() -> Any:
            return put(next(batches))

        def each() -> Iterator:
            pending.extend(thread.submit(make) for _ in range(AHEAD))
            while pending:
                try:
                    batch = pending.popleft().result()
                except StopIteration:
                    return
                pending.append(thread.submit(make))
                yield batch

        try:
            yield each()
        finally:
            thread.shutdown(cancel_futures=True)


def _prepare(index: int, count: int) -> None:
    from recipes.data.readers import prepare_reader

    del index, count
    prepare_reader()
