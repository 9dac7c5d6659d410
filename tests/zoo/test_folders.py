"""Folders in an object store, and the addresses of them."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import zoo
from tests import helpers
from tests.object_store import Store, object_store
from tests.zoo.weights_common import LLAMA, model
from zoo.checks import ConfigError
from zoo.folders import Remote, at, copy, files


@pytest.fixture
def store(monkeypatch) -> Iterator[Store]:
    with object_store(monkeypatch) as store:
        yield store


def remote(address: str) -> Remote:
    folder = at(address)
    assert isinstance(folder, Remote)
    return folder


def test_a_remote_folder_holds_what_was_written(store, tmp_path):
    folder = remote("s3://bucket/some/where/")
    assert (str(folder), folder.name, str(folder.parent)) == ("s3://bucket/some/where", "where", "s3://bucket/some")
    assert folder / "a" == remote("s3://bucket/some/where/a")
    contents = {f"{number}/a file": b"%d" % number for number in range(10)}  # more than a page of the listing
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder.parent / "where else").write_text("not in it")
    assert folder.names() == sorted(contents)
    assert {name: (folder / name).read_bytes() for name in contents} == contents
    assert (folder / "1/a file").exists()
    assert not (folder / "1/a").exists()
    (folder / "1").remove()
    assert store.below("some/where/1") == []
    assert len(folder.names()) == 9
    (tmp_path / "x").write_text("x")
    copy(tmp_path / "x", folder)
    copy(folder / "x", tmp_path / "made")
    assert (tmp_path / "made" / "x").read_text() == "x"
    assert list(files(folder)) == ["x"]


def test_what_a_store_refuses_is_one_line(store):
    folder = remote("s3://bucket/run")
    with pytest.raises(FileNotFoundError):
        (folder / "x").read_text()
    with pytest.raises(OSError, match="NoSuchBucket: The specified bucket does not exist: 's3://other/run'"):
        remote("s3://other/run").names()
    folder.require_writable()
    assert store.objects == {}
    store.closed = True
    with pytest.raises(OSError, match="PERMISSION_DENIED: AccessDenied: Access Denied: 's3://bucket/run'"):
        folder.require_writable()


WRONG = {  # what is no address -> what is said of it
    "ftp://bucket/run": "is at no known kind of store, ftp\nallowed: a local folder, gs://BUCKET/PATH, s3://BUCKET/PATH",
    "s3://Bucket/run": "Bucket cannot be the name of a bucket",
    "gs:///run": "nothing cannot be the name of a bucket",
    "gs://bucket": "needs a path within the bucket",
    "s3://bucket/a//b": "needs a path within the bucket",
    "s3://bucket/../b": "needs a path within the bucket",
    "s3://bucket/a?b": "needs a path within the bucket",
}


@pytest.mark.parametrize("address", WRONG)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError) as refused:
        at(address, "train.checkpoint_dir")
    assert str(refused.value).startswith(f"train.checkpoint_dir={address}: {WRONG[address]}")


def test_paths_are_local_and_addresses_are_of_a_driver_of_tensorstore(monkeypatch):
    assert at("runs/a") == Path("runs/a")
    assert remote("gs://bucket/run").spec == {"driver": "gcs", "bucket": "bucket", "path": "run/"}
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert remote("s3://bucket/run").spec == {"driver": "s3", "bucket": "bucket", "path": "run/"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example/")
    served = {"endpoint": "https://store.example", "aws_region": "eu-west-1"}
    assert remote("s3://bucket/run").spec == {"driver": "s3", "bucket": "bucket", "path": "run/", **served}


def test_weights_are_saved_into_a_store_as_a_whole_or_not_at_all(store, monkeypatch):
    weights = model(LLAMA)
    zoo.save(weights, "s3://bucket/weights")
    helpers.assert_bit_equal(*(jax.tree.leaves(each) for each in (zoo.load("s3://bucket/weights"), weights)))
    assert store.changes[-1] == ("PUT", "weights/config.yaml")
    with pytest.raises(ConfigError, match="exists already; nothing is overwritten"):
        zoo.save(weights, "s3://bucket/weights")
    with pytest.raises(ConfigError, match="must be a local folder"):
        zoo.export(weights, "s3://bucket/exported")
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        zoo.load("s3://bucket/others")
    store.closed = True
    with pytest.raises(ConfigError, match=r"out=s3://bucket/others: cannot be written: .*AccessDenied: Access Denied$"):
        zoo.save(weights, "s3://bucket/others")
    store.closed = False

    def fails(*_: object) -> None:
        assert store.below("others")
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.checkpoint.describe", fails)
    with pytest.raises(KeyboardInterrupt):
        zoo.save(weights, "s3://bucket/others")
    assert store.below("others") == []
