"""Folders, local or in an object store (`gs://bucket/path`, `s3://bucket/path`). Free of jax.

A store knows no folders and renames nothing: a folder is how the names of its objects begin. What must be there as a
whole or not at all, a checkpoint, is complete once its `config.yaml` is there, written last and removed first.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from zoo.checks import ConfigError

CONFIG, WEIGHTS, BESIDE = "config.yaml", "weights", "huggingface"  # of a checkpoint
ALLOWED = ("a local folder", "gs://BUCKET/PATH", "s3://BUCKET/PATH")
_RETRIES = {"gs": "gcs_request_retries", "s3": "s3_request_retries"}
_CREDENTIALS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, gcloud or the machine",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine; AWS_ENDPOINT_URL names the server",
}
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_ASK_S, _ASK_RETRIES = 30, 3  # for how long a store is asked whether it is there; 3 retries take 8 s
_WAIT_S = 1800.0  # for what tensorstore tries again by itself, for a quarter of an hour


class Remote:
    """A folder or an object of a store, used like a `pathlib.Path` as far as both go.

    Every method raises OSError, its `strerror` one line, where the store cannot be reached or refuses.
    """

    def __init__(self, store: "_Store", path: str):
        self._store, self._path = store, path

    def __str__(self) -> str:
        return f"{self._store.scheme}://{self._store.bucket}/{self._path}"

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "Remote":
        return Remote(self._store, f"{self._path}/{name}")

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> "Remote":
        return Remote(self._store, self._path.rpartition("/")[0])

    @property
    def spec(self) -> dict[str, Any]:
        """What tensorstore opens this folder's objects from, with `context`."""
        return {**self._store.spec, "path": f"{self._path}/"}

    @property
    def context(self) -> Any:
        """The `tensorstore.Context` of all that is read from and written to this store: it holds the credentials."""
        return self._store.context

    @property
    def credentials(self) -> str:
        """Where the store's credentials are looked for."""
        return _CREDENTIALS[self._store.scheme]

    def exists(self) -> bool:
        """Whether there is such an object. Gives up within seconds where the store does not answer."""
        return self._path in self._listed(self._path, f"{self._path}\0", quick=True)

    def names(self) -> list[str]:
        """The names of all objects in this folder and those within, from it on: `4/config.yaml`."""
        start = f"{self._path}/"
        return sorted(name.removeprefix(start) for name in self._listed(start, f"{self._path}0"))

    def read_bytes(self) -> bytes:
        if not self.exists():  # which tells of a missing bucket, and does not wait for a store that is not there
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return self._done(lambda store: store.read(self._path)).value

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        self._done(lambda store: store.write(self._path, content))

    def write_text(self, content: str) -> None:
        self.write_bytes(content.encode())

    def remove(self) -> None:
        """Removes the folder, that which says that it is complete first; nothing if it is not there."""
        self._done(lambda store: store.write(f"{self._path}/{CONFIG}", None))
        names = self.names()
        for removal in [self._store.patient.write(f"{self._path}/{name}", None) for name in names]:  # all at once
            self._done(lambda _, removal=removal: removal)

    def require_writable(self) -> None:
        """Writes an object of a name of its own and removes it; gives up as `exists` does."""
        name = f"{self._path}/.writable-{uuid.uuid4().hex}"
        for content in (b"\n", None):
            self._done(lambda store, content=content: store.write(name, content), quick=True)

    def _listed(self, first: str, end: str, quick: bool = False) -> list[str]:
        """The names from `first` on and before `end`: not every server keeps to what it is asked for."""
        import tensorstore

        asked = tensorstore.KvStore.KeyRange(first, end)
        found = (name.decode() for name in self._done(lambda store: store.list(asked), quick=quick))
        return [name for name in found if first <= name < end]

    def _done(self, start: Callable[[Any], Any], quick: bool = False) -> Any:
        """What comes of an operation on the store; `quick`: it is not waited for longer than for an answer."""
        try:
            return start(self._store.quick if quick else self._store.patient).result(_ASK_S if quick else _WAIT_S)
        except TimeoutError as error:
            raise OSError(errno.ETIMEDOUT, "the store does not answer", str(self)) from error
        except (ValueError, RuntimeError) as error:
            raise OSError(errno.EIO, short(error), str(self)) from error


class _Store:
    """A bucket, opened when it is first asked for something."""

    def __init__(self, scheme: str, bucket: str):
        self.scheme, self.bucket = scheme, bucket

    @property
    def spec(self) -> dict[str, Any]:
        """The members of tensorstore's driver, with what the standard variables of S3 say and it does not read."""
        if self.scheme == "gs":
            return {"driver": "gcs", "bucket": self.bucket}
        spec: dict[str, Any] = {"driver": "s3", "bucket": self.bucket}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if endpoint:
            spec["endpoint"] = endpoint.rstrip("/")
        if endpoint and region:  # AWS itself is asked for the bucket's
            spec["aws_region"] = region
        if {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= os.environ.keys():
            spec["aws_credentials"] = {"type": "environment"}  # first anyway; the others complain of absent files
        return spec

    @cached_property
    def context(self) -> Any:
        import tensorstore

        return tensorstore.Context()

    @cached_property
    def patient(self) -> Any:
        return self._open({})

    @cached_property
    def quick(self) -> Any:
        return self._open({_RETRIES[self.scheme]: {"max_retries": _ASK_RETRIES}})

    def _open(self, more: dict[str, Any]) -> Any:
        import tensorstore

        return tensorstore.KvStore.open({**self.spec, **more}, context=self.context).result(_ASK_S)


Folder = Path | Remote


def at(folder: str | Folder, key: str = "folder") -> Folder:
    """The folder of a path or an address. Raises ConfigError, which names `key`, for what is no address of a store."""
    if isinstance(folder, Remote):
        return folder
    scheme, separator, rest = str(folder).partition("://")
    if not separator:
        return Path(folder).expanduser()
    if scheme not in _RETRIES:
        raise ConfigError(key, folder, f"is at no known kind of store, {scheme}", allowed=ALLOWED, name=f"{scheme}://")
    bucket, _, path = rest.rstrip("/").partition("/")
    if not _BUCKET.fullmatch(bucket):
        problem = f"{bucket or 'nothing'} cannot be the name of a bucket: 3 or more of a-z, 0-9, '-', '_' and '.'"
        raise ConfigError(key, folder, problem, allowed=ALLOWED)
    if not path or any(part in ("", ".", "..") for part in path.split("/")) or re.search(r"[\0-\x1f?#]", path):
        raise ConfigError(key, folder, "needs a path within the bucket, such as runs/a", allowed=ALLOWED)
    return Remote(_Store(scheme, bucket), path)


def takes_files(folder: Path) -> bool:
    """Whether this is a local folder that files can be put into."""
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def patience_s(folder: Folder) -> float | None:
    """For how long one answer about arrays in a folder is waited for; None, for as long as it takes, of a disk."""
    return _WAIT_S if isinstance(folder, Remote) else None


def files(folder: Folder) -> dict[str, Folder]:
    """The files of a folder by name; none if it is not there."""
    if isinstance(folder, Remote):
        return {name: folder / name for name in folder.names() if "/" not in name}
    return {file.name: file for file in sorted(folder.glob("*"))}


def copy(file: Folder, to: Folder) -> None:
    """Copies a file into a folder, which is made if it is not there, under its name."""
    if isinstance(to, Path):
        to.mkdir(exist_ok=True)
    if isinstance(file, Path) and isinstance(to, Path):
        shutil.copyfile(file, to / file.name)
    else:
        (to / file.name).write_bytes(file.read_bytes())


def short(error: BaseException) -> str:
    """The first line, without tensorstore's list of settings."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(" [")[0]
