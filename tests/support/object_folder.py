"""An object store in a folder, for processes of one machine: `objects:///path`.

As in S3, an object appears whole when its upload ends. fsspec's own `file://` shows what is written so far.
"""

import contextlib
import os
import tempfile

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

_UPLOADS = ".upload-"


class ObjectFolder(LocalFileSystem):
    protocol = "objects"

    def _open(self, path, mode="rb", block_size=None, **options):
        if mode != "wb":
            return super()._open(path, mode, block_size=block_size, **options)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return _Upload(self, path, mode, block_size=block_size or "default", **options)

    def ls(self, path, detail=False, **options):
        entries = [entry for entry in super().ls(path, detail=True, **options) if _UPLOADS not in entry["name"]]
        return entries if detail else [entry["name"] for entry in entries]


class _Upload(AbstractBufferedFile):
    def _initiate_upload(self):
        handle, self._part = tempfile.mkstemp(prefix=_UPLOADS, dir=os.path.dirname(self.path))
        os.close(handle)

    def _upload_chunk(self, final=False):
        with open(self._part, "ab") as file:
            file.write(self.buffer.getvalue())
        if final:
            os.replace(self._part, self.path)
        return True

    def discard(self):
        with contextlib.suppress(AttributeError, FileNotFoundError):
            os.unlink(self._part)


fsspec.register_implementation(ObjectFolder.protocol, ObjectFolder, clobber=True)
