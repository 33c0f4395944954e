"""The documents of a source's files: one pass checks every record and notes where it lies.

24 bytes of memory per document; the documents stay in their files. An epoch reads them in an order of its own, a
permutation that is computed and not stored, so the position in it is one number.
"""

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from headrace.training.data.base import DataError, Document, Reader, Record, complaint

ENCODED = 16
"""Records of each file that the check also encodes: it finds a format that does not fit, and takes no time."""


class Index:
    """The checked documents of one source."""

    def __init__(self, path: Path, reader: Reader, held_out: float, source: str = "") -> None:
        """held_out: share of the documents, by a hash of their bytes. source: hash of a reader from outside. DataError
        for the first that is not right."""
        self._reader = reader
        self._paths = _files(path, reader)
        self._trained, self._held = _Records(), _Records()
        content = blake2b(source.encode(), digest_size=16)
        for number, file in enumerate(self._paths):
            seen = 0
            for record, raw in _records(file, reader):
                digest = blake2b(raw, digest_size=8).digest()
                content.update(digest)
                where = f"{file}, line {record.line}"
                try:
                    reader.check(raw, file)
                    if seen < ENCODED:
                        reader.encode(raw, file)
                except ValueError as error:
                    raise DataError(f"{where}: {complaint(error)}") from None
                seen += 1
                is_held = int.from_bytes(digest, "little") < held_out * 2**64
                (self._held if is_held else self._trained).add(number, record)
        self.digest = content.hexdigest()
        """Names content and reader: others have other positions."""
        if not len(self._trained):
            raise DataError(f"{path}: expected documents to train on, got {len(self._held)} held-out and no other")

    def __len__(self) -> int:
        return len(self._trained)

    def document(self, epoch: int, place: int, seed: str) -> Document:
        """The document at a place of an epoch. DataError when the file has changed or its format does not fit."""
        return self._read(self._trained, permuted(place, len(self._trained), f"{seed}/{epoch}"))

    def held_out(self) -> Iterator[Document]:
        """Held-out documents in their order."""
        for number in range(len(self._held)):
            yield self._read(self._held, number)

    def _read(self, records: "_Records", number: int) -> Document:
        file, record = records.at(number)
        path = self._paths[file]
        try:
            with path.open("rb") as stream:
                stream.seek(record.offset)
                return self._reader.encode(stream.read(record.size), path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DataError(f"{path}, line {record.line}: {complaint(error)}") from None


class _Records:
    """Records in flat arrays."""

    def __init__(self) -> None:
        self._file, self._offset = array("I"), array("Q")
        self._size, self._line = array("I"), array("Q")

    def __len__(self) -> int:
        return len(self._file)

    def add(self, file: int, record: Record) -> None:
        self._file.append(file)
        self._offset.append(record.offset)
        self._size.append(record.size)
        self._line.append(record.line)

    def at(self, number: int) -> tuple[int, Record]:
        return self._file[number], Record(self._offset[number], self._size[number], self._line[number])


def _files(path: Path, reader: Reader) -> list[Path]:
    """The file, or the files of a folder, hidden ones left out, in the order of their names."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: expected a file or a folder, got neither")
    inside = (file for file in path.rglob("*") if file.is_file())
    files = sorted(
        file
        for file in inside
        if (not reader.suffixes or file.suffix in reader.suffixes)
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"{path}: expected files{' with ' + reader.suffixes[0] if reader.suffixes else ''}, got none")
    return files


def _records(path: Path, reader: Reader) -> Iterator[tuple[Record, bytes]]:
    """Every record of a file that is not blank."""
    line, offset = 1, 0
    try:
        with path.open("rb") as file:
            while (record := reader.next(file, path, line)) is not None:
                raw, lines = record
                if raw.strip():
                    yield Record(offset, len(raw), line), raw
                line, offset = line + lines, offset + len(raw)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}, line {line}: {complaint(error)}") from None


def permuted(place: int, count: int, key: str) -> int:
    """A permutation of range(count), named by its key: four rounds of a Feistel network, walked until it is inside."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = place
    while True:
        left, right = value >> half, value & mask
        for turn in range(4):
            mixed = blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        value = left << half | right
        if value < count:
            return value
