"""The S3 server of the checkpoint benchmarks: it does nothing with a body besides taking it.

The simulator joins the parts of a multipart upload into fresh memory, which would be charged to the clients
that use multipart. Here parts stay as they came until somebody reads them, and all memory is used again.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any, Self

from tests.simulators.s3 import _ROOT, BUCKET, S3Process, S3Server
from tests.simulators.s3_buckets import Buckets, _name, _tag, _xml, fail
from tests.simulators.s3_wire import Buffers, Request, Response


class _Parts(list[bytearray]):
    """The parts of an upload in order; its length is in bytes, as an object's is."""

    def __len__(self) -> int:
        return sum(len(part) for part in self)

    def join(self, buffers: Buffers) -> bytearray:
        whole, start = buffers.take(len(self)), 0
        for part in self:
            whole[start : start + len(part)] = part
            start += len(part)
        return whole


class _LazyBuckets(Buckets):
    def _write(self, request: Request, bucket: str, key: str) -> Response:
        if request.method != "POST":
            return super()._write(request, bucket, key)
        if (upload := self.uploads.pop(request.query.get("uploadId", ""), None)) is None:
            return fail(404, "NoSuchUpload", "The specified upload does not exist")
        parts: Any = _Parts(upload.parts[number] for number in sorted(upload.parts))
        etag = self._store(bucket, key, parts)
        return _xml("CompleteMultipartUploadResult", _name(bucket, key) + _tag("ETag", etag))

    def _get(self, request: Request, bucket: str, key: str) -> Any:
        with self._lock:
            found: Any = self._objects[bucket].get(key)
            if found is not None and isinstance(found.data, _Parts):
                parts, found.data = found.data, found.data.join(self._buffers)
                for part in parts:
                    self._buffers.give_back(part)
        return super()._get(request, bucket, key)

    def _remove(self, bucket: str, key: str) -> None:
        found: Any = self._objects[bucket].get(key)
        if found is not None and isinstance(found.data, _Parts):
            for part in found.data:
                self._buffers.give_back(part)
            found.data = bytearray()
        super()._remove(bucket, key)


class BenchmarkServer(S3Process):
    """The server in a process of its own."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.checkpoint_server"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self


def _main() -> None:
    server = S3Server()
    server.buckets = _LazyBuckets((BUCKET,), server._buffers)
    print(server.port, flush=True)
    threading.Thread(target=server.serve, daemon=True).start()
    sys.stdin.read()  # until the benchmark ends


if __name__ == "__main__":
    _main()
