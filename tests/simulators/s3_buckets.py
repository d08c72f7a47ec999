"""What an S3 service keeps: buckets, objects, multipart uploads, and what each operation does to them."""

from __future__ import annotations

import html
import itertools
import re
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import unquote

from tests.simulators.s3_wire import Buffers, Request, Response

_MAX_KEYS = 1000


@dataclass
class _Object:
    data: bytearray
    etag: str
    modified: float = field(default_factory=time.time)
    readers: int = 0


@dataclass
class _Upload:
    bucket: str
    key: str
    parts: dict[int, bytearray] = field(default_factory=dict)


class Buckets:
    """The state of the service; `answer` applies one request to it."""

    def __init__(self, names: Sequence[str], buffers: Buffers) -> None:
        self.ignore_conditions = False
        self.uploads: dict[str, _Upload] = {}
        self._lock = threading.RLock()
        self._buffers = buffers
        self._objects: dict[str, dict[str, _Object]] = {name: {} for name in names}
        self._sorted: dict[str, list[str]] = {name: [] for name in names}
        self._numbers = itertools.count(1)

    def answer(self, request: Request) -> tuple[Response, Callable[[], None]]:
        """Return the response and what to call once it was sent."""
        bucket, _, key = request.path.lstrip("/").partition("/")
        if request.method == "PUT" and not key and not request.query:
            with self._lock:
                self._objects.setdefault(bucket, {})
                self._sorted.setdefault(bucket, [])
            return Response(), _nothing
        if bucket not in self._objects:
            return fail(404, "NoSuchBucket", "The specified bucket does not exist"), _nothing
        if not key:
            return self._answer_for_bucket(request, bucket), _nothing
        if request.method in {"GET", "HEAD"}:
            return self._get(request, bucket, key)
        return self._change(request, bucket, key), _nothing

    def read(self, bucket: str, key: str) -> bytes:
        """Return an object as a test sees it."""
        with self._lock:
            return bytes(self._objects[bucket][key].data)

    def write(self, bucket: str, key: str, data: bytes) -> None:
        """Place or damage an object behind the clients' back."""
        with self._lock:
            self._store(bucket, key, bytearray(data))

    def keys(self, bucket: str) -> list[str]:
        with self._lock:
            return list(self._sorted[bucket])

    def clear(self) -> None:
        """Remove all objects and uploads; their buffers are used again."""
        with self._lock:
            for bucket in self._objects:
                for key in self.keys(bucket):
                    self._remove(bucket, key)
            self.uploads.clear()

    def _answer_for_bucket(self, request: Request, bucket: str) -> Response:
        if request.method == "HEAD":
            return Response()
        if request.method == "POST" and "delete" in request.query:
            keys = [html.unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", request.body.decode())]
            with self._lock:
                for key in keys:
                    self._remove(bucket, key)
            return _xml("DeleteResult", "".join(f"<Deleted>{_tag('Key', key)}</Deleted>" for key in keys))
        if "uploads" in request.query:
            uploads = [f"{_tag('Key', up.key)}{_tag('UploadId', name)}" for name, up in self.uploads.items()]
            return _xml("ListMultipartUploadsResult", "".join(f"<Upload>{text}</Upload>" for text in uploads))
        if "location" in request.query:
            return _xml("LocationConstraint", "")
        return self._list(request, bucket)

    def _list(self, request: Request, bucket: str) -> Response:
        """ListObjectsV2: keys after a token or `start-after`, those below the delimiter folded up."""
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        last = request.query.get("continuation-token") or request.query.get("start-after", "")
        limit = min(int(request.query.get("max-keys", _MAX_KEYS)), _MAX_KEYS)
        found: list[str] = []
        with self._lock:
            keys, objects = self._sorted[bucket], self._objects[bucket]
            index = max(bisect_left(keys, prefix), bisect_right(keys, last))
            while index < len(keys) and keys[index].startswith(prefix) and len(found) < limit:
                key = keys[index]
                index += 1
                if delimiter and delimiter in key[len(prefix) :]:
                    folder = prefix + key[len(prefix) :].split(delimiter)[0] + delimiter
                    index = bisect_left(keys, folder + "\U0010ffff")
                    if not last.startswith(folder):
                        last = folder
                        found.append(f"<CommonPrefixes>{_tag('Prefix', folder)}</CommonPrefixes>")
                    continue
                last = key
                found.append(_render_entry(key, objects[key]))
            more = index < len(keys) and keys[index].startswith(prefix)
        head = f"{_tag('Name', bucket)}{_tag('Prefix', prefix)}{_tag('KeyCount', len(found))}"
        head += f"{_tag('MaxKeys', limit)}{_tag('IsTruncated', str(more).lower())}"
        head += _tag("NextContinuationToken", last) if more else ""
        return _xml("ListBucketResult", head + "".join(found))

    def _get(self, request: Request, bucket: str, key: str) -> tuple[Response, Callable[[], None]]:
        with self._lock:
            found = self._objects[bucket].get(key)
            if found is None:
                return fail(404, "NoSuchKey", "The specified key does not exist."), _nothing
            found.readers += 1
        size, start, end, status = len(found.data), 0, len(found.data), 200
        headers = {"ETag": found.etag, "Last-Modified": formatdate(found.modified, usegmt=True)}
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "")):
            first, last = match.groups()
            start = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"

        def finish() -> None:
            with self._lock:
                found.readers -= 1

        if start >= size > 0:
            return fail(416, "InvalidRange", "The requested range is not satisfiable"), finish
        headers["Content-Length"] = str(end - start)
        return Response(status, memoryview(found.data)[start:end], headers), finish

    def _change(self, request: Request, bucket: str, key: str) -> Response:
        query = request.query
        with self._lock:
            if request.method == "DELETE":
                if "uploadId" in query:
                    self.uploads.pop(query["uploadId"], None)
                else:
                    self._remove(bucket, key)
                return Response(204)
            if request.method == "POST" and "uploads" in query:
                name = f"upload-{next(self._numbers)}"
                self.uploads[name] = _Upload(bucket, key)
                return _xml("InitiateMultipartUploadResult", _name(bucket, key) + _tag("UploadId", name))
            if request.method == "PUT" and "partNumber" in query:
                if (upload := self.uploads.get(query["uploadId"])) is None:
                    return fail(404, "NoSuchUpload", "The specified upload does not exist")
                upload.parts[int(query["partNumber"])] = request.body
                return Response(headers={"ETag": self._make_etag()})
            if not self.ignore_conditions and self._is_refused(request, bucket, key):
                return fail(412, "PreconditionFailed", "A condition of the request does not hold")
            return self._write(request, bucket, key)

    def _write(self, request: Request, bucket: str, key: str) -> Response:
        """Make an object of the body, of another object, or of an upload's parts."""
        if request.method == "POST":
            if (upload := self.uploads.pop(request.query.get("uploadId", ""), None)) is None:
                return fail(404, "NoSuchUpload", "The specified upload does not exist")
            etag = self._store(bucket, key, bytearray().join(upload.parts[n] for n in sorted(upload.parts)))
            return _xml("CompleteMultipartUploadResult", _name(bucket, key) + _tag("ETag", etag))
        if source := request.headers.get("x-amz-copy-source"):
            from_bucket, _, from_key = unquote(source).lstrip("/").partition("/")
            if (found := self._objects.get(from_bucket, {}).get(from_key)) is None:
                return fail(404, "NoSuchKey", "The specified key does not exist.")
            etag = self._store(bucket, key, bytearray(found.data))
            return _xml("CopyObjectResult", _tag("ETag", etag) + _tag("LastModified", _iso(time.time())))
        return Response(headers={"ETag": self._store(bucket, key, request.body)})

    def _is_refused(self, request: Request, bucket: str, key: str) -> bool:
        found = self._objects[bucket].get(key)
        if request.headers.get("if-none-match") == "*":
            return found is not None
        wanted = request.headers.get("if-match")
        return wanted is not None and (found is None or found.etag != wanted)

    def _store(self, bucket: str, key: str, data: bytearray) -> str:
        if key in self._objects[bucket]:
            self._remove(bucket, key)
        insort(self._sorted[bucket], key)
        self._objects[bucket][key] = made = _Object(data, self._make_etag())
        return made.etag

    def _remove(self, bucket: str, key: str) -> None:
        if (found := self._objects[bucket].pop(key, None)) is not None:
            del self._sorted[bucket][bisect_left(self._sorted[bucket], key)]
            if not found.readers:
                self._buffers.give_back(found.data)

    def _make_etag(self) -> str:
        return f'"{next(self._numbers):032x}"'


def fail(status: int, code: str, message: str) -> Response:
    """Return an error as S3 spells it."""
    text = f"{_tag('Code', code)}{_tag('Message', message)}{_tag('RequestId', '1')}"
    return Response(status, _xml("Error", text).body, {"Content-Type": "application/xml"})


def _nothing() -> None:
    """Is called where no buffer was lent."""


def _xml(name: str, text: str) -> Response:
    body = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{text}</{name}>'.encode()
    return Response(200, body, {"Content-Type": "application/xml"})


def _tag(name: str, value: object) -> str:
    return f"<{name}>{html.escape(str(value), quote=False)}</{name}>"


def _name(bucket: str, key: str) -> str:
    return _tag("Bucket", bucket) + _tag("Key", key)


def _render_entry(key: str, entry: _Object) -> str:
    fields = (("Key", key), ("LastModified", _iso(entry.modified)), ("ETag", entry.etag))
    text = "".join(_tag(name, value) for name, value in (*fields, ("Size", len(entry.data))))
    return f"<Contents>{text}<StorageClass>STANDARD</StorageClass></Contents>"


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
