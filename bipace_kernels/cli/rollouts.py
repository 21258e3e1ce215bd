"""Reads step records from .jsonl, .jsonl.gz and .parquet files.  The row schema is docs/data.md.

A file is read to its end before anything is computed, and the first bad record stops the run with CliError, which names
file, line and field, what was expected and what was found.  Only the needed columns are read.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.schema import LIMIT
from ..support import optional as _optional
from ._console import CliError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet", ".pq")
LONGEST_LINE = 64  # MiB
MOST_BLANK = 10_000_000  # lines: reading so many takes seconds
MOST_FIELDS = 100_000  # of a line or a Parquet file: reading millions takes a minute
BOMB_BYTES, BOMB_RATIO = 1 << 30, 200  # a file that unpacks to more bytes, and to a larger ratio, is refused
FLOAT32_MAX = float(np.finfo(np.float32).max)

Ints = npt.NDArray[np.int64]
Advance = Callable[[int], None]  # called with the number of bytes read since the last call


@dataclass(frozen=True)
class Columns:
    """Names of the columns; the defaults are the schema of docs/data.md."""

    task: str = "task_id"
    rollout: str = "rollout"
    step: str = "step"
    observation: str = "observation"
    reward: str = "reward"
    action: str = "action"
    valid: str = "valid"
    success: str = "success"
    truncated: str = "truncated"
    fingerprint: str | None = None

    def __getattr__(self, name: str) -> str:  # of what trainers record
        if not name.startswith("trained_"):
            raise AttributeError(name)
        return name.replace("trained", "bipace", 1)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Columns:
        """From the options --NAME-column."""
        return cls(**{f.name: values[f"{f.name}_column"] for f in fields(cls) if f"{f.name}_column" in values})


REQUIRED = ("task", "rollout", "step", "observation", "reward")


@dataclass(frozen=True)
class Source:
    """One file that was read."""

    path: str  # as the user wrote it
    sha256: str
    records: int
    unit: str  # unit of its records: "line" or "row"


@dataclass
class Rollouts:
    """Step records of all files, in the order of the files and of their lines: N entries in each list."""

    sources: list[Source] = field(default_factory=list)
    file: list[int] = field(default_factory=list)  # index into sources
    line: list[int] = field(default_factory=list)  # counted from 1
    task: list[str | int] = field(default_factory=list)
    rollout: list[str | int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    observation: list[str] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    action: list[str] | None = None
    valid: list[bool] | None = None
    success: list[bool] | None = None
    truncated: list[bool] | None = None
    trained_advantage: list[float] | None = None
    trained_cluster: list[int] | None = None
    trained_value: list[float] | None = None
    trained_returns: list[float] | None = None
    trained_delta: list[float] | None = None
    trained_step_term: list[float] | None = None
    trained_neighbours: list[list[float]] | None = None  # rows of the file, counted from 0
    trained_kernel: list[list[float]] | None = None
    fingerprint: Any = None  # [N, D] array or lists
    merged: bool = False  # whether equal task ids of different files are one group
    group: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [N] numbered by first appearance
    trajectory: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [N] unique in the batch

    def __len__(self) -> int:
        return len(self.file)

    def where(self, row: int) -> str:
        """'rollouts.jsonl, line 17' of a record."""
        source = self.sources[self.file[row]]
        return f"{source.path}, {source.unit} {self.line[row]}"

    def file_names(self) -> list[str]:
        """A name for each source; their paths, where files of two training runs have equal names."""
        names = [Path(source.path).name for source in self.sources]
        return names if len(set(names)) == len(names) else [source.path for source in self.sources]

    def is_valid(self, row: int) -> bool:
        return self.valid is None or self.valid[row]

    def counts(self) -> dict[str, int]:
        """Valid records, their trajectories and prompt groups."""
        rows = [row for row in range(len(self)) if self.is_valid(row)]
        groups, trajectories = len(np.unique(self.group[rows])), len(np.unique(self.trajectory[rows]))
        return {"records": len(rows), "trajectories": trajectories, "groups": groups}

    def select(self, rows: Sequence[int]) -> Rollouts:
        """Some of the records, renumbered."""
        kept = ("sources", "merged", "group", "trajectory")
        columns: dict[str, Any] = {
            name: [values[row] for row in rows]
            for name, values in vars(self).items()
            if name not in kept and values is not None
        }
        part = replace(self, **columns)
        part.number()
        return part

    def number(self) -> None:
        """Numbers groups by first appearance and trajectories inside them: integer rollouts in their numeric order, so
        that shuffled lines change nothing; others by first appearance.
        """
        groups: dict[Any, int] = {}
        trajectories: dict[Any, dict[Any, int]] = {}  # not by pairs, whose hashes can be chosen equal
        group = np.empty(len(self), np.int64)
        trajectory = np.empty(len(self), np.int64)
        places: list[tuple[int, int, int]] = []
        for row, (file, task, rollout) in enumerate(zip(self.file, self.task, self.rollout, strict=True)):
            group[row] = g = groups.setdefault(task if self.merged else (file, task), len(groups))
            trajectory[row] = t = trajectories.setdefault((file, g), {}).setdefault(rollout, len(places))
            if t == len(places):
                places.append((g, file, rollout if isinstance(rollout, int) else t))
        number = np.empty(len(places), np.int64)
        number[sorted(range(len(places)), key=places.__getitem__)] = np.arange(len(places))
        self.group, self.trajectory = group, number[trajectory]


def read(
    paths: Sequence[str],
    columns: Columns | None = None,
    *,
    needed: Sequence[str] = (),
    wanted: Sequence[str] = (),
    merge_files: bool = False,
    allow_nonfinite: bool = False,
    longest_line: int = LONGEST_LINE,
    advance: Advance | None = None,
) -> Rollouts:
    """The step records of all files; CliError for the first bad one.

    needed           optional fields of Columns that every record must have
    wanted           optional fields read if a file's first record has them; then every record must have them ("valid"
                     and "truncated" may be missing, and mean true and false)
    merge_files      a group is a task id of all files together, not of one file
    longest_line     longest line of JSONL, in MiB
    allow_nonfinite  accept NaN, infinite and huge rewards and fingerprints (for on_invalid="singleton")
    """
    columns = columns or Columns()
    _check_paths(paths)
    rollouts = Rollouts(merged=merge_files)
    optional = (*needed, *(name for name in wanted if name not in needed))
    for name in optional:
        setattr(rollouts, name, [])
    seen: set[str] = set()
    everywhere = {*optional}
    for index, path in enumerate(paths):
        written = os.stat(path).st_mtime_ns
        parser = _Parser(rollouts, index, path, columns, needed, optional, allow_nonfinite)
        if merge_files and index:
            parser.id_types["task"] = type(rollouts.task[0])
        if parser.is_parquet:
            _read_parquet(parser, advance)
        else:
            for line, record in json_lines(path, advance, longest_line=longest_line):
                if not parser.fields:
                    parser.start(record.__contains__)
                parser.add(record, line)
        rollouts.sources.append(Source(path, _sha256(path), parser.records, parser.unit))
        warn_if_changed(path, written)
        seen |= parser.seen
        if parser.records == 0:
            raise CliError(f"{path} holds no records; give a file with one step record per {parser.unit}.")
        everywhere &= {name for name, _, _ in parser.fields}
    for name in {*optional} - everywhere:  # not in every file's first record: then for no record
        setattr(rollouts, name, None)
        if name in seen:
            what = f'"{getattr(columns, name)}" is not in the first record of every file: it is used for no record.'
            warnings.warn(what, RuntimeWarning, stacklevel=2)
    for name in wanted:
        column = getattr(columns, name)
        if name not in seen and column != getattr(Columns(), name):
            raise CliError(f'No record of {", ".join(paths)} has the field "{column}" that --{name}-column names.')
    rollouts.number()
    return rollouts


def warn_if_changed(path: str, written: int) -> None:
    """A warning if another program has written to a file since its modification time was `written`, in ns."""
    if os.stat(path).st_mtime_ns != written:
        text = f"{path} changed while it was read: what was read may be neither its old content nor its new."
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _check_paths(paths: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for path in paths:
        if not os.path.isfile(path):
            fact = "is not a file" if os.path.exists(path) else "does not exist"
            raise CliError(f"{path} {fact}; give the path of a .jsonl, .jsonl.gz or .parquet file.")
        if any("\ud800" <= c <= "\udfff" for c in path):  # tables and figures could not name it
            raise CliError(f"{path!a} must be valid UTF-8; rename the file.")
        name = path.lower()
        if name.removesuffix(".gz").endswith(".json"):
            raise CliError(f"{path} is a .json file; write one record per line, and name it .jsonl.")
        if not name.removesuffix(".gz").endswith(JSONL_SUFFIXES) and not name.endswith(PARQUET_SUFFIXES):
            raise CliError(f"{path} has an unknown suffix; expected .jsonl, .jsonl.gz or .parquet.")
        real = os.path.realpath(path)
        if real in seen:
            also = "" if seen[real] == path else f" (also as {seen[real]})"
            raise CliError(f"{path} is given twice{also}; give each file once.")
        seen[real] = path


TRAINED = ("advantage", "value", "returns", "delta", "step_term")
# Checks of the fields, methods of _Parser.
CHECKS = {
    **dict.fromkeys(("task", "rollout"), "id"),
    **dict.fromkeys(("observation", "action"), "text"),
    **dict.fromkeys(("reward", *(f"trained_{name}" for name in TRAINED)), "reward"),
    **dict.fromkeys(("trained_neighbours", "trained_kernel"), "numbers"),
    **dict.fromkeys(("valid", "success", "truncated"), "flag"),
    **{"step": "step", "trained_cluster": "step", "fingerprint": "vector"},
}
# A log may mark only its padding, or only what was cut off: a record without the field is valid, and was not.
DEFAULTS = {"valid": True, "truncated": False}


@dataclass
class _Parser:
    """Checks the records of one file and appends them to the lists of `rollouts`."""

    rollouts: Rollouts
    index: int
    path: str
    columns: Columns
    needed: Sequence[str]
    optional: Sequence[str]
    allow_nonfinite: bool
    seen: set[str] = field(default_factory=set)  # in at least one record
    records: int = 0
    id_types: dict[str, type] = field(default_factory=dict)
    fields: list[tuple[str, str, Callable[[str, Any], Any]]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # which the first record lacks

    def __post_init__(self) -> None:
        self.is_parquet = Path(self.path).suffix.lower() in PARQUET_SUFFIXES
        self.unit = "row" if self.is_parquet else "line"

    def start(self, has: Callable[[str], bool]) -> None:
        """Determines the file's optional columns, from its first record or its schema."""
        for name in (*REQUIRED, *self.optional):
            column = str(getattr(self.columns, name))
            if name in REQUIRED or name in self.needed or name in DEFAULTS or has(column):
                self.fields.append((name, column, getattr(self, f"_{CHECKS[name]}")))
            else:
                self.left_out.append((name, column))

    def add(self, record: dict[str, Any], line: int) -> None:
        rollouts = self.rollouts
        self.seen.update(name for name, column in self.left_out if column in record)
        for name, column, check in self.fields:
            if column not in record:
                if name not in DEFAULTS:
                    raise self._missing(line, name, column, record)
                getattr(rollouts, name).append(DEFAULTS[name])
                continue
            value = record[column]
            self.seen.add(name)
            try:
                value = check(name, value)
            except _Wrong as wrong:
                here = f'{self.path}, {self.unit} {line}, field "{column}"'
                raise CliError(f"{here}: expected {wrong.wish}, got {wrong.fact}.{wrong.cure}") from None
            getattr(rollouts, name).append(value)
        rollouts.file.append(self.index)
        rollouts.line.append(line)
        self.records += 1

    def _missing(self, line: int, name: str, column: str, record: dict[str, Any]) -> CliError:
        cure = f"name its column with --{name}-column"
        if name in self.optional and name not in self.needed:
            cure = "the file's first record has it, so every record must"
        fact = f'the field "{column}" is missing'
        return CliError(f"{self.path}, {self.unit} {line}: {fact}; {cure}. Found: {_names(record)}.")

    # Checks of one value.  Exact types: isinstance(True, int), but True is not a step number.

    def _id(self, name: str, value: Any) -> str | int:
        if type(value) is not str and type(value) is not int:
            raise _Wrong("a string or an integer", value)
        first = self.id_types.setdefault(name, type(value))
        if type(value) is not first:
            kind = "a string" if first is str else "an integer"
            raise _Wrong(f"{kind} like in the records before", value, ' Of ids of two kinds, 1 and "1" look alike.')
        return self._text(name, value) if isinstance(value, str) else self._int64(value)

    def _int64(self, value: int) -> int:
        if not -(2**63) <= value < 2**63:
            raise _Wrong("an integer of 64 bits", value)
        return value

    def _step(self, name: str, value: Any) -> int:
        low = -1 if name == "trained_cluster" else 0
        if type(value) is not int or value < low:
            raise _Wrong(f"an integer of at least {low}".replace("-", "−"), value)
        return self._int64(value)

    def _text(self, name: str, value: Any) -> str:
        if type(value) is not str:
            cure = ""
            if isinstance(value, (list, dict)):
                cure = " Join chat messages into one text first."
            elif value is None and name == "action":
                cure = " A step without an action may hold an empty string."
            raise _Wrong("a string", value, cure)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise _Wrong("valid Unicode", value, f" Half a surrogate pair is at character {error.start}.") from None
        return value

    def _reward(self, name: str, value: Any) -> float:
        if type(value) is not float and type(value) is not int:
            raise _Wrong("a finite number", value)
        number = _float(value)
        if not self.allow_nonfinite and not abs(number) <= LIMIT:  # the estimators count it as not finite
            bounds = f" within ±{LIMIT:.0e}".replace("e+", "e") if math.isfinite(number) else ""
            raise _Wrong(f"a finite number{bounds}", value, _SET_ASIDE)
        return number

    def _flag(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise _Wrong("true or false", value)
        return value

    def _numbers(self, name: str, value: Any) -> list[float]:
        if type(value) is not list or not all(type(x) is float or type(x) is int for x in value):
            raise _Wrong("a list of numbers", value)
        return value

    def _vector(self, name: str, value: Any) -> list[float]:
        if not self._numbers(name, value):
            raise _Wrong("a list of numbers", value)
        width = len(self.rollouts.fingerprint[0]) if self.rollouts.fingerprint else len(value)
        if len(value) != width:
            raise _Wrong(f"a list of {width} numbers like in the records before", fact=f"{len(value)} numbers")
        return [self._entry(x) for x in value]

    def _entry(self, value: float) -> float:
        """An entry of a fingerprint.  NaN and infinities pass: padding may hold them, and records are checked later."""
        number = _float(value)
        if abs(number) <= FLOAT32_MAX or (isinstance(value, float) and not math.isfinite(value)):
            return number
        if not self.allow_nonfinite:
            raise _Wrong("a list of numbers that fit float32", value)
        return math.copysign(math.inf, number)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.inf if value > 0 else -math.inf


_SET_ASIDE = " --on-invalid singleton sets its trajectory aside instead."


class _Wrong(Exception):
    """A value that fails its check."""

    def __init__(self, wish: str, value: Any = None, cure: str = "", *, fact: str = "") -> None:
        self.wish, self.fact, self.cure = wish, fact or _shown(value), cure


def _cut(name: str) -> str:
    """A field's name for a message: one line, at most 60 characters."""
    name = name if len(name) <= 60 else name[:57] + "..."
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _names(fields: Iterable[Any]) -> str:
    """'task_id, rollout and 3 more'; 20 names at most."""
    names = [str(name) for name in fields]
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(map(_cut, names[:20])) + more or "no field at all"


def _shown(value: Any) -> str:
    """A value in the file's notation: null, true, "a text ...", a list."""
    kinds: dict[type, str] = {list: "a list", dict: "an object", bytes: "bytes"}
    if type(value) in kinds:
        return kinds[type(value)]
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    if value is None or isinstance(value, (int, float)):
        return json.dumps(value)
    text = str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the string {json.dumps(text)}" if isinstance(value, str) else f"{type(value).__name__} {text}"


class _Repeated(ValueError):
    """A JSON object that holds a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _Repeated(next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1))
    return made


def json_lines(
    path: str, advance: Advance | None = None, *, longest_line: int = LONGEST_LINE
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, counted from 1, and object of each non-blank line of a possibly gzipped file; CliError names the line.

    longest_line   in MiB
    """
    line = read = unpacked = blank = 0
    most = longest_line << 20
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"  # by content, so that renamed files work
            raw.seek(0)
            stream: Any = io.BufferedReader(GzipFile(fileobj=raw), 1 << 16) if zipped else raw
            for line, text in enumerate(iter(lambda: stream.readline(most + 1), b""), 1):
                if len(text) > most:
                    raise CliError(
                        f"{path}, line {line}: expected at most {longest_line} MiB, got more; write one record per "
                        f"line, or use --longest-line {2 * longest_line}."
                    )
                unpacked += len(text)
                if zipped:
                    _check_unpacked(unpacked, raw.tell(), f"{path}, line {line}")
                if advance is not None and raw.tell() - read >= 1 << 16:
                    advance(raw.tell() - read)
                    read = raw.tell()
                if len(text) > MOST_FIELDS and text.count(b'":') - text.count(b'\\":') > MOST_FIELDS:
                    raise CliError(f"{path}, line {line}: expected one record, got more than {MOST_FIELDS:,} fields.")
                if line == 1:
                    text = text.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark, as some editors write
                if text.strip(b" \t\r\n"):
                    yield line, _json_object(text, line, f"{path}, line {line}")
                elif (blank := blank + 1) > MOST_BLANK:
                    raise CliError(f"{path}, line {line}: expected records, got more than {MOST_BLANK:,} blank lines.")
    except (EOFError, BadGzipFile, zlib.error) as error:
        reason = str(error).rstrip(".")
        raise CliError(f"{path} is truncated or damaged after line {line}: {reason}. Copy it again.") from None
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror or error}.") from None


def _check_unpacked(unpacked: int, size: int, where: str) -> None:
    """CliError for a file that unpacks to very much, as hostile ones do.  size: the bytes of it that were read."""
    if unpacked > max(BOMB_BYTES, BOMB_RATIO * size):
        raise CliError(
            f"{where}: it unpacks to more than {BOMB_RATIO} times its size, {unpacked >> 20:,} MiB so far; write it as "
            "plain .jsonl first if that is intended."
        )


def _json_object(raw: bytes, line: int, here: str) -> dict[str, Any]:
    if line == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise CliError(f"{here}: the file is UTF-16, expected UTF-8. Convert it, e.g. with iconv -f UTF-16 -t UTF-8.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{here}: expected UTF-8, got 0x{raw[error.start]:02x} at byte {error.start + 1}.") from None
    try:
        # Without its line end: an unfinished object ends in this line, and not at column 1 of the next.
        record = json.loads(text.rstrip(), object_pairs_hook=_object)
    except _Repeated as error:
        raise CliError(f'{here}, field "{_cut(str(error))}": the key occurs twice in one object; keep one.') from None
    except json.JSONDecodeError as error:
        cure = "" if raw.endswith(b"\n") else " It is the last line, without a line end: the file may be truncated."
        raise CliError(
            f"{here}: expected one JSON object, got invalid JSON ({error.msg} at column {error.pos + 1}).{cure}"
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets nested thousandfold
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0]
        raise CliError(f"{here}: expected one JSON object, got JSON that cannot be read ({reason}).") from None
    if type(record) is not dict:
        cure = " Write one record per line, not one list of records." if isinstance(record, list) else ""
        raise CliError(f"{here}: expected one JSON object, got {_shown(record)}.{cure}")
    return record


def _read_parquet(parser: _Parser, advance: Advance | None) -> None:
    _optional.need("pyarrow", "a Parquet file")
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    path = parser.path
    try:
        with pq.ParquetFile(path, thrift_container_size_limit=MOST_FIELDS, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            parser.start(lambda column: column in names)
            for name, column, _ in parser.fields:
                if names.count(column) != 1 and not (name in DEFAULTS and column not in names):
                    fact = "is missing" if column not in names else "stands there twice"
                    cure = f"name the right one with --{name}-column"
                    raise CliError(f'{path}: the column "{column}" {fact}; {cure}. Found: {_names(names)}.')
            columns = list(dict.fromkeys(column for _, column, _ in parser.fields if column in names))
            _add_batches(parser, file, columns, advance)
            if parser.records != (wanted := file.metadata.num_rows):
                raise CliError(f"{path} is damaged: it has {parser.records} of its {wanted} rows. Copy it again.")
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise CliError(f"{path} cannot be read as Parquet: {reason}.") from None
    except UnicodeDecodeError:
        raise CliError(f"{path} cannot be read: after row {parser.records} a text is not UTF-8.") from None


def _add_batches(parser: _Parser, file: Any, columns: list[str], advance: Advance | None) -> None:
    size, unpacked = os.path.getsize(parser.path), 0
    for batch in file.iter_batches(batch_size=128, columns=columns):  # small: each row may hold the longest text
        values = []
        for column in columns:
            entries = batch.column(column)
            entries = entries.dictionary_decode() if hasattr(entries, "dictionary_decode") else entries
            unpacked += entries.nbytes
            _check_unpacked(unpacked, size, f"{parser.path}, row {parser.records + 1}")
            try:
                values.append(entries.to_pylist())
            except UnicodeDecodeError:
                raise
            except (ValueError, OverflowError) as error:  # times finer or farther than Python's
                fact = f"its type {batch.column(column).type} cannot be read"
                raise CliError(f'{parser.path}, field "{column}": {fact}; write numbers or texts ({error}).') from None
        for record in zip(*values, strict=True):
            parser.add(dict(zip(columns, record, strict=True)), parser.records + 1)
        if advance is not None:
            advance(size * batch.num_rows // max(1, file.metadata.num_rows))


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
