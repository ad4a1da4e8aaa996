"""What weights are, found from their files: digests that are computed once a file.

Rules:
1. The whole content counts: an edited layer anywhere in a checkpoint is another model. SHA-256, because
   adapters may come from tenants that do not trust each other.
2. A file in a Hugging Face cache is a link to a blob that is named after its digest: nothing is read.
3. A digest is remembered by path, size, mtime and inode, in `$XDG_CACHE_HOME/kvtier/digests.jsonl`: one line
   a file, appended in one write, so that a torn line costs only itself. A file that changed within the last
   two seconds is not remembered: the next change might carry the same mtime.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

log = logging.getLogger("kvtier")

WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt", ".msgpack", ".h5"))
RACY_S = 2.0
CACHE_BYTES_MAX = 4 << 20
READ_BYTES = 8 << 20
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class _Known(msgspec.Struct, array_like=True, gc=False):
    path: str
    size_bytes: int
    mtime_ns: int
    inode: int
    digest: str


class DigestCache:
    """File digests, remembered on disk. What cannot be remembered is computed again."""

    def __init__(self, path: Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = path if path is not None else Path(base) / "kvtier" / "digests.jsonl"
        self._known: dict[tuple[str, int, int, int], str] | None = None

    def of_file(self, path: Path) -> str:
        """Hex digest of a file's content. Raises OSError."""
        real = path.resolve(strict=True)
        if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
            return f"blob:{real.name}"
        stat = real.stat()
        at = (str(real), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        known = self._load()
        if at not in known:
            digest = _sha256(real)
            if time.time() - stat.st_mtime < RACY_S:
                return digest
            known[at] = digest
            self._append(_Known(*at, digest))
        return known[at]

    def of_files(self, paths: Iterable[Path]) -> str:
        """Hex digest of several files: their names and contents, whatever their order."""
        whole = hashlib.sha256()
        for path in sorted(paths, key=lambda p: p.name):
            for part in (path.name, self.of_file(path)):
                whole.update(len(part).to_bytes(8, "little") + part.encode())
        return whole.hexdigest()

    def _load(self) -> dict[tuple[str, int, int, int], str]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError):
                for line in self._path.read_bytes().splitlines():
                    with contextlib.suppress(msgspec.DecodeError):
                        k = msgspec.json.decode(line, type=_Known)
                        self._known[k.path, k.size_bytes, k.mtime_ns, k.inode] = k.digest
        return self._known

    def _append(self, entry: _Known) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            if self._path.exists() and self._path.stat().st_size > CACHE_BYTES_MAX:
                flags |= os.O_TRUNC
            fd = os.open(self._path, flags, 0o600)
            try:
                os.write(fd, b"\n" + msgspec.json.encode(entry) + b"\n")
            finally:
                os.close(fd)
        except OSError as error:
            log.info("digests cannot be remembered in %s (%s): they are computed at every start", self._path, error)


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint or an adapter that hold weights, and the adapter's own settings."""
    return [
        path
        for path in directory.iterdir()
        if path.suffix in WEIGHT_SUFFIXES or path.name in ("adapter_config.json", "quantize_config.json")
    ]


def signature(paths: Iterable[Path]) -> tuple[tuple[str, int, int, int], ...]:
    """What a stat tells of files; differs when one was replaced. Raises OSError."""
    found = []
    for path in sorted(paths):
        stat = path.stat()
        found.append((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
