"""Versioned JSON files: read with their format and version checked first, never half written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Content = TypeVar("Content")


def replace_file(target: Path, text: str) -> None:
    """Write to a file beside the target, then rename: a reader never sees a part."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class Document:
    """A kind of file: what it is called, the newest version that is known, and how it complains."""

    what: str
    format: str
    version: int
    error: type[Exception]
    again: str  # what makes a new one: "plan again"
    advice: str = ""  # what a damaged one's message ends with
    oldest: int = 1  # older versions are refused
    anew: Callable[[Mapping[str, Any]], str] = lambda head: ""  # how an old one is made again

    def save(self, path: str | Path, text: str) -> None:
        """Replace the file, or say why it cannot be."""
        target = Path(path)
        if not target.parent.is_dir():
            raise self.error(f"Cannot write {target}: the folder {target.parent} does not exist.")
        try:
            replace_file(target, text)
        except OSError as error:
            raise self.error(f"Cannot write {target}: {error.strerror}.") from error

    def read(self, path: str | Path) -> bytes:
        """What the file holds."""
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise self.error(f"Cannot read the {self.what} {path}: {error.strerror}.") from error

    def decode(self, data: bytes, source: str, kind: type[Content]) -> Content:
        """Parse and validate; the version is looked at before anything else."""
        head = self._head(data, source)
        try:
            return msgspec.convert(head, kind)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self.error(f"{source} is damaged: {error}.{self.advice}") from error

    def _head(self, data: bytes, source: str) -> dict[str, Any]:
        try:
            head = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(
                f"{source} is not complete JSON ({error}): was it truncated?{self.advice}"
            ) from error
        if not isinstance(head, dict) or head.get("format") != self.format:
            raise self.error(
                f'{source} is not a shardfold {self.what}: it has no "format": "{self.format}".'
            )
        version = head.get("version")
        if not isinstance(version, int) or version > self.version:
            raise self.error(
                f"{source} has {self.what} version {version!r}; this shardfold reads up to "
                f"{self.version}. Upgrade shardfold, or {self.again}."
            )
        if version < self.oldest:
            raise self.error(
                f"{source} has {self.what} version {version}; this shardfold reads from "
                f"{self.oldest} on. {self.anew(head)}"
            )
        return head
