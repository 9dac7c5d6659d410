"""Tokens of files, kept in a folder so that they are made once: by name of all that they depend on."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.data.files import Found
from recipes.data.records import Reader
from recipes.data.store import MAX_KEPT, Store, open_store
from recipes.data.tokenise import into, read, too_many
from recipes.data.tokenizer import Bytes, Codec
from zoo.checks import ConfigError

FORMAT = 1  # raise it when equal files would be read otherwise
SMALL_BYTES = {True: 64 * 2**20, False: 2 * 2**20}  # read at every start rather than kept: as plain bytes, otherwise


def documents(found: Found, reader: Reader, codec: Codec, *, cache: str, readers: int, most: int) -> Store:
    """The tokenised documents of some files: those of small ones in memory, all others mapped from `cache`.

    There, a folder is named after paths, sizes and times of the files and how they are read. It appears whole or not
    at all; of several processes that need it one makes it while the others wait. Raises ConfigError for more than
    `most` malformed records, if there is no document, and if the cache cannot be written.
    """
    plain = reader.field is None and isinstance(codec, Bytes)
    packed = any(file.packed for file in found.files)
    if found.num_bytes <= SMALL_BYTES[plain] and not packed:
        store = read(found, reader, codec, most)
    else:
        store = _kept(found, reader, codec, Path(cache).expanduser(), readers, most)
    told = store.told
    if told.num_malformed > most:  # when it was made more were allowed
        where, what = told.malformed[min(most, MAX_KEPT - 1)]
        raise too_many(found.key, where, what, most)
    if not len(store.lengths):
        kind = "binary" if reader.field is None else "other"
        skipped = f" ({told.num_skipped} {kind} files were skipped)" if told.num_skipped else ""
        raise ConfigError(found.key, found.asked, f"holds no text{skipped}")
    return store


def _kept(found: Found, reader: Reader, codec: Codec, cache: Path, readers: int, most: int) -> Store:
    folder = cache / _name(found, reader, codec)
    if (kept := _opened(folder)) is not None:  # in a folder that may be read only
        return kept
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if _opened(folder) is None:
                _make(folder, found, reader, codec, readers, most)
            return open_store(folder)
    except OSError as error:
        raise ConfigError("data.cache", cache, f"cannot be written: {error.strerror or error}") from error


def _opened(folder: Path) -> Store | None:
    """What was kept, if it is whole."""
    try:
        return open_store(folder)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


def _make(folder: Path, found: Found, reader: Reader, codec: Codec, readers: int, most: int) -> None:
    print(f"tokenising {found.num_bytes / 1e6:,.1f} MB of {found.asked} into {folder}", flush=True)
    for left in folder.parent.glob(f".{folder.name}-*"):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    start, partial = time.perf_counter(), Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        into(partial, found, reader, codec, most, readers)
        if _opened(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)  # damaged, if it is there
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"tokenised in {time.perf_counter() - start:.1f} s", flush=True)


def _name(found: Found, reader: Reader, codec: Codec) -> str:
    files = [[file.name, os.path.abspath(file.path), file.num_bytes, file.modified_ns] for file in found.files]
    told = [FORMAT, reader.field, reader.prompt_field, reader.alone, codec.fingerprint, found.num_skipped, files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds a lock that the system lets go when this process ends; where there are none, the folder's move decides."""
    import fcntl

    with file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
