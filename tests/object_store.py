"""A small object store that speaks as much of S3 as tensorstore asks for: objects in memory, no signatures checked."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

BUCKET, PAGE = "bucket", 7  # a listing comes in pages of so many names


class Store:
    """What is in the bucket by name, and every change as `("PUT", name)`; while `closed` none is allowed."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.changes: list[tuple[str, str]] = []
        self.closed = False
        self.lock = threading.Lock()

    def below(self, prefix: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(prefix))


@contextmanager
def object_store(patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store that `s3://bucket/...` leads to as long as `patch` holds."""
    store = Store()
    server = _Server(store)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, store: Store):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which would hold back every answer for 40 ms

    @property
    def _store(self) -> Store:
        assert isinstance(self.server, _Server)
        return self.server.store

    def do_GET(self) -> None:
        bucket, name, query = self._asked()
        if bucket != BUCKET:
            return self._refuse(404, "NoSuchBucket", "The specified bucket does not exist")
        if "list-type" in query:
            return self._answer(200, _listing(self._store, query))
        content = self._store.objects.get(name)
        if content is None:
            return self._refuse(404, "NoSuchKey", "The specified key does not exist.")
        if self.headers["If-None-Match"] == _tag(content):
            return self._answer(304, b"", ETag=_tag(content))
        first, _, last = (self.headers["Range"] or "").removeprefix("bytes=").partition("-")
        if not (first or last):
            return self._answer(200, content, ETag=_tag(content))
        start = int(first) if first else max(0, len(content) - int(last))
        part = content[start : int(last) + 1 if first and last else None]
        place = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
        return self._answer(206, part, ETag=_tag(content), Content_Range=place)

    def do_HEAD(self) -> None:
        _, name, _ = self._asked()
        content = self._store.objects.get(name)
        if name and content is None:
            return self._answer(404, b"")
        return self._answer(200, content or b"", ETag=_tag(content or b""))

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self._change(content)

    def do_DELETE(self) -> None:
        self._change(None)

    def _change(self, content: bytes | None) -> None:
        store, (bucket, name, _) = self._store, self._asked()
        if bucket != BUCKET:
            return self._refuse(404, "NoSuchBucket", "The specified bucket does not exist")
        if store.closed:
            return self._refuse(403, "AccessDenied", "Access Denied")
        with store.lock:
            there = store.objects.get(name)
            wanted, unwanted = self.headers["If-Match"], self.headers["If-None-Match"]
            if wanted not in (None, there and _tag(there)) or (unwanted and there is not None):
                return self._refuse(412, "PreconditionFailed", "The object is another one")
            store.changes.append((self.command, name))
            if content is None:
                store.objects.pop(name, None)
            else:
                store.objects[name] = content
        return self._answer(204 if content is None else 200, b"", ETag=_tag(content or b""))

    def _asked(self) -> tuple[str, str, dict[str, str]]:
        asked = urlsplit(self.path)
        bucket, _, name = asked.path.removeprefix("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(asked.query, keep_blank_values=True).items()}
        return bucket, unquote(name), query

    def _refuse(self, code: int, word: str, text: str) -> None:
        self._answer(code, f"<Error><Code>{word}</Code><Message>{text}</Message></Error>".encode())

    def _answer(self, code: int, content: bytes, **headers: str) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *_: object) -> None:
        pass


def _listing(store: Store, query: dict[str, str]) -> bytes:
    """The next page of the names that begin with a prefix."""
    with store.lock:
        names = [name for name in store.below(query.get("prefix", "")) if name > query.get("continuation-token", "")]
    page, rest = names[:PAGE], names[PAGE:]
    found = "".join(f"<Contents><Key>{escape(name)}</Key><Size>1</Size></Contents>" for name in page)
    more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
    head = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>"
    return f"<ListBucketResult>{head}{found}{more}</ListBucketResult>".encode()


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
