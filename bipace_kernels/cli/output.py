"""Results: checks of where they go, and tables in the format that a path names."""

import contextlib
import csv
import gzip
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..support import optional
from ._console import CliError

PARQUET_SUFFIXES = (".parquet", ".pq")
TABLE_SUFFIXES = (*PARQUET_SUFFIXES, ".csv", ".jsonl", ".jsonl.gz")


def check_table_path(path: str, inputs: list[str]) -> None:
    """Raises CliError, before any work is done, if a table cannot be written to this path."""
    if not path.lower().endswith(TABLE_SUFFIXES):
        raise CliError(f"--out {path} must end in one of {', '.join(TABLE_SUFFIXES)}.")
    if os.path.isdir(path):
        raise CliError(f"--out {path} is a folder; give the path of a file.")
    if os.path.realpath(path) in {os.path.realpath(file) for file in inputs}:
        raise CliError(f"--out {path} is one of the inputs; give another path.")
    check_folder(str(Path(path).parent), "--out")
    if path.lower().endswith(PARQUET_SUFFIXES):
        optional.need("pyarrow", "a Parquet file")


def check_folder(folder: str, option: str) -> None:
    """Raises CliError if a file cannot be created in this folder, or the folder cannot be created."""
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not (folder and place.is_dir()):
        raise CliError(f"{option}: {place if folder else 'an empty text'} is not a folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise CliError(f"{option}: the folder {place} is not writable; choose another one.")


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns the errors of a full disk and the like into CliError."""
    try:
        yield
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror or error}.") from None


def write_table(path: Path, columns: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Writes columns (name -> NumPy array or list, all of one length) in the format that the suffix names.

    metadata   JSON-able; Parquet holds it under the key "bipace", the text formats cannot hold it.
    """
    name = path.name.lower()
    if name.endswith(PARQUET_SUFFIXES):
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        parquet = pa.table(columns).replace_schema_metadata({"bipace": json.dumps(metadata, sort_keys=True)})
        pq.write_table(parquet, path, compression="zstd", write_page_checksum=True)
        return
    rows = zip(*map(_plain, columns.values()), strict=True)
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(open(path, "wb"))
        if name.endswith(".gz"):  # no name, no time inside
            file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        text = stack.enter_context(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        if name.endswith(".csv"):
            # Quotes around every text: older Pythons leave them out around a lone carriage return.
            csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerows(chain([columns], rows))
            return
        for row in rows:
            text.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, allow_nan=False) + "\n")


def _plain(values: Any) -> list[Any]:
    """Python values; a float32 as the shortest decimal that rounds to it."""
    if isinstance(values, np.ndarray) and values.dtype == np.float32:
        return [float(str(value)) for value in values]
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
