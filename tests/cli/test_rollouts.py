"""Reading step records: every kind of bad record is named by file, line and field; good ones come through unchanged."""

import gzip
import hashlib
import json
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused

from bipace_kernels.cli import rollouts, states
from bipace_kernels.cli._console import CliError

IDS = {"task_id": "t", "rollout": 0, "step": 0}
GOOD = {**IDS, "observation": "room", "reward": 0.0, "action": "go", "success": True}


def record(**changes):
    return {**GOOD, **changes}


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


def write(path, *lines):
    """Writes lines: dicts as JSON, str and bytes as they are."""
    texts = [line if isinstance(line, (str, bytes)) else json.dumps(line) for line in lines]
    path.write_bytes(b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts))
    return str(path)


def error_of(path, **options):
    return refused("", rollouts.read, [path], error=CliError, **options)


def outcome(path, **options):
    """The records, or the message of the CliError; any other exception goes through and fails the test."""
    try:
        return rollouts.read([path], **options)
    except CliError as error:
        return str(error)


def test_reads_what_was_written_under_any_names(tmp_path):
    path = write(tmp_path / "a.jsonl", record(), "", record(step=1, reward=1, observation="é\n", extra=[1]), "   ")
    read = rollouts.read([path], needed=["action"], wanted=["success", "valid"])
    assert read.observation == ["room", "é\n"] and read.reward == [0.0, 1.0] and read.step == [0, 1]
    assert read.line == [1, 3]  # blank lines count, and are no records
    assert read.action == ["go", "go"] and read.success == [True, True] and read.valid == [True, True]
    assert read.group.tolist() == [0, 0] and read.trajectory.tolist() == [0, 0]
    assert read.where(1) == f"{path}, line 3" and read.sources[0].records == 2
    assert read.sources[0].sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    path = write(tmp_path / "b.jsonl", {"q": 1, "r": "x", "s": 4, "o": "hi", "w": 2, "a": "b"})
    columns = rollouts.Columns(task="q", rollout="r", step="s", observation="o", reward="w", action="a")
    read = rollouts.read([path], columns, needed=["action"])
    assert (read.task, read.rollout, read.step, read.reward, read.action) == ([1], ["x"], [4], [2.0], ["b"])


def test_gzip_is_told_by_content(tmp_path):
    plain = Path(write(tmp_path / "a.jsonl", record())).read_bytes()
    for name, data in (("b.jsonl.gz", gzip.compress(plain)), ("b.jsonl", gzip.compress(plain)), ("c.jsonl.gz", plain)):
        (tmp_path / name).write_bytes(data)
        assert rollouts.read([str(tmp_path / name)]).observation == ["room"]
    windows = tmp_path / "d.jsonl"  # a byte order mark, and Windows' line ends
    windows.write_bytes(b"\xef\xbb\xbf" + plain.rstrip() + b"\r\n" + json.dumps(record(step=1)).encode())
    assert rollouts.read([str(windows)]).step == [0, 1]


BAD_LINES = {
    "not json": ("{oops", ["line 2", "expected one JSON object", "invalid JSON", "column 2"]),
    "unfinished": ('{"task_id": 1', ["line 2", "invalid JSON", "column 14"]),
    "number": ("3", ["line 2", "expected one JSON object", "got 3"]),
    "not utf-8": (b'{"task_id": "\xff"}', ["line 2", "expected UTF-8", "0xff at byte 14"]),
    "repeated key": ('{"task_id": "a", "task_id": "b"}', ["line 2", 'field "task_id"', "occurs twice"]),
    "nested": ("[" * 100_000, ["line 2", "nests too deeply"]),
    "huge integer": ('{"step": ' + "9" * 5000 + "}", ["line 2", "cannot be read"]),
    "missing task": (without("task_id"), ["line 2", '"task_id" is missing', "--task-column", "rollout, step"]),
    "missing action": (without("action"), ["line 2", '"action" is missing', "--action-column"]),
    "empty object": ("{}", ["line 2", '"task_id" is missing', "no field at all"]),
    "null task": (record(task_id=None), ["line 2", 'field "task_id"', "expected a string or an integer", "got null"]),
    "kind of id": (record(task_id=7), ["line 2", 'field "task_id"', "a string like in the records before", "got 7"]),
    "kind of rollout": (record(rollout="0"), ["line 2", 'field "rollout"', "an integer like", 'the string "0"']),
    "big rollout": (record(rollout=2**63), ["line 2", "expected an integer of 64 bits", "got 9223372036854775808"]),
    "bool step": (record(step=False), ["line 2", 'field "step"', "got false"]),
    "negative step": (record(step=-1), ["line 2", 'field "step"', "got -1"]),
    "chat": (record(observation=[{"role": "user"}]), ["line 2", 'field "observation"', "a list", "Join chat messages"]),
    "surrogate": ('{"task_id": "a\\ud800"}', ["line 2", 'field "task_id"', "valid Unicode", "character 1"]),
    "bool reward": (record(reward=True), ["line 2", 'field "reward"', "got true"]),
    "nan": (record(reward=float("nan")), ["line 2", 'field "reward"', "got NaN", "--on-invalid singleton"]),
    "overflow": ('{"task_id":"t","rollout":0,"step":1,"observation":"","reward":1e999}', ["line 2", "got Infinity"]),
    "huge reward": (record(reward=10**400), ["line 2", 'field "reward"', "more than 256 bits"]),
    "large reward": (record(reward=-1e300), ["line 2", 'field "reward"', "within ±1e37, got -1e+300", "--on-invalid"]),
    "many long names": ({f"{i} \n\ud800 {'x' * 999}": 0 for i in range(30)}, ["Found: 0 ", "xxx..., 1 ", "10 more"]),
    "long repeated key": ('{"K": 1, "K": 2}'.replace("K", "k" * 999), ["line 2", "kkk...", "occurs twice"]),
    "null action": (record(action=None), ["line 2", 'field "action"', "got null", "empty string"]),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, name):
    line, parts = BAD_LINES[name]
    path = write(tmp_path / "bad.jsonl", record(), line, record(step=2))
    message = error_of(path, needed=["action"])
    for part in [path, *parts]:
        assert part in message, (part, message)
    assert "\n" not in message  # one paragraph
    assert len(message) < 600 or (name == "many long names" and len(message) < 1600)
    message.encode()


@pytest.mark.parametrize("zipped", [False, True])
def test_a_line_of_any_length_is_not_read_whole(tmp_path, zipped):
    """The file's second line would need 2 MiB; with gzip a bomb of any size fits into a small file."""
    path = tmp_path / "a.jsonl"
    data = (json.dumps(record()) + "\n").encode() + bytes(2 << 20)
    path.write_bytes(gzip.compress(data) if zipped else data)
    with pytest.raises(CliError, match=r"a.jsonl, line 2: expected at most 1 MiB, got more; .*--longest-line 2\."):
        rollouts.read([str(path)], longest_line=1)
    refused(r"line 2: expected one JSON object", rollouts.read, [str(path)], error=CliError, longest_line=2)


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    """Blank lines in a gzipped file; one long text in a Parquet file's dictionary, which every row points to."""
    monkeypatch.setattr(rollouts, "BOMB_BYTES", 1 << 16)
    path, table = tmp_path / "a.jsonl.gz", tmp_path / "a.parquet"
    path.write_bytes(gzip.compress(b" " * 1023 + b"\n" * (1 << 19)))
    rows = pa.Table.from_pylist([record(rollout=i, observation="x" * 10_000) for i in range(300)])
    pq.write_table(rows.set_column(3, "observation", rows["observation"].dictionary_encode()), table)
    for file in (table, path):
        refused(r"unpacks to more than 200 times its size.*\.jsonl", rollouts.read, [str(file)], error=CliError)
    monkeypatch.setattr(rollouts, "BOMB_RATIO", 10_000)
    refused("holds no records", rollouts.read, [str(path)], error=CliError)
    monkeypatch.setattr(rollouts, "MOST_BLANK", 1000)
    refused("line 1001: expected records, got more than 1,000 blank lines", rollouts.read, [str(path)], error=CliError)


def test_truncated_and_damaged_files(tmp_path):
    line, plain = json.dumps(record()).encode(), tmp_path / "c.jsonl"
    for data, part in ((line + b'\n{"task_id": "t", "ro', "may be truncated"), (b"\xff\xfe" + line, "UTF-16")):
        plain.write_bytes(data)
        assert part in error_of(str(plain))
    path = write(tmp_path / "a.jsonl", *(record(step=i, observation=os.urandom(20).hex()) for i in range(3000)))
    data = gzip.compress(Path(path).read_bytes())
    bad = tmp_path / "b.jsonl.gz"
    bad.write_bytes(data[: len(data) // 2])
    message = error_of(str(bad))
    assert str(bad) in message and "is truncated or damaged after line" in message and "line 0" not in message
    for change in (data[:-8] + b"12345678", data + b"garbage", data[:3000] + b"\xff" * 9 + data[3009:], data[:12]):
        bad.write_bytes(change)
        assert str(bad) in error_of(str(bad))


def test_paths(tmp_path):
    for content in (b"", b"\n\n  \n", b"\xef\xbb\xbf\n"):
        for name, data in (("a.jsonl", content), ("a.jsonl.gz", gzip.compress(content))):
            (tmp_path / name).write_bytes(data)
            assert "holds no records" in error_of(str(tmp_path / name))
    assert "does not exist" in error_of(str(tmp_path / "none.jsonl")) and "is not a file" in error_of(str(tmp_path))
    (tmp_path / "a.txt").write_text("{}")
    assert "unknown suffix" in error_of(str(tmp_path / "a.txt"))
    path = write(tmp_path / "a.jsonl", record())
    assert "must be valid UTF-8; rename" in error_of(str(write(tmp_path / "\udcff.jsonl", record())))
    os.symlink(path, tmp_path / "b.jsonl")
    refused("given twice", rollouts.read, [path, str(tmp_path / "b.jsonl")], error=CliError)


def test_a_file_that_is_written_to_while_it_is_read_is_told(tmp_path, recwarn):
    path = write(tmp_path / "a.jsonl", *(record(step=i, observation="x" * 99) for i in range(9000)))
    rollouts.read([path], advance=lambda n: os.utime(path, ns=(n, n)))
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    held = states.load_fingerprints(str(tmp_path / "a.npy"), 2)
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    assert held.all() and len(recwarn) == 1 and f"{path} changed while it was read" in str(recwarn[0].message)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path):
    path = write(tmp_path / "a.jsonl", record())
    os.chmod(path, 0)
    assert "cannot be read" in error_of(path)


def test_nonfinite_rewards_pass_where_they_are_set_aside(tmp_path):
    path = write(tmp_path / "a.jsonl", record(reward=float("nan")), record(step=1, reward=float("inf")))
    write(tmp_path / "huge.jsonl", record(reward=1e300), record(step=1, reward=1e37), record(step=2, reward=10**400))
    assert rollouts.read([str(tmp_path / "huge.jsonl")], allow_nonfinite=True).reward == [1e300, 1e37, np.inf]
    read = rollouts.read([path], allow_nonfinite=True)
    assert np.isnan(read.reward[0]) and read.reward[1] == np.inf


def test_a_column_that_a_record_or_file_lacks_is_left_out_or_named(tmp_path):
    one, two = write(tmp_path / "a.jsonl", record()), write(tmp_path / "b.jsonl", without("success"))
    three = write(tmp_path / "c.jsonl", without("success"), record(step=1))
    with pytest.warns(RuntimeWarning, match='"success" is not in the first record of every file'):
        assert rollouts.read([three], wanted=["success"]).success is None
    for paths in ([one, two], [two, one]):
        with pytest.warns(RuntimeWarning, match='"success" is not in the first record of every file'):
            read = rollouts.read(paths, wanted=["success", "action"])
        assert read.success is None and read.action == ["go", "go"]
    four = write(tmp_path / "e.jsonl", record(task_id=1))  # where files are merged, "1" and 1 would be two prompts
    wrong = 'e.jsonl, line 1, field "task_id": expected a string like in the records before, got 1'
    refused(wrong, rollouts.read, [one, four], error=CliError, merge_files=True)
    path = write(tmp_path / "d.jsonl", record(), {**without("success"), "step": 1})
    assert "first record has it" in error_of(path, wanted=["success"])
    for name in ("valid", "success", "action"):
        message = error_of(one, columns=rollouts.Columns(**{name: "typo"}), wanted=[name])
        assert f'{one} has the field "typo" that --{name}-column names' in message


def test_ids_of_one_hash_are_numbered_without_comparing_all_pairs():
    compared = Mock(side_effect=int.__eq__)
    same = type("Same", (int,), {"__hash__": lambda _: 7, "__eq__": lambda *two: compared(*two)})
    ids = [same(k) for k in range(32)]
    read = rollouts.Rollouts(file=[0] * 1024, task=[one for one in ids for _ in ids], rollout=ids * 32)
    read.number()
    assert read.trajectory.tolist() == list(range(1024)) and compared.call_count < 100_000


def test_a_record_that_does_not_say_is_valid(tmp_path):
    one = write(tmp_path / "a.jsonl", record(), record(step=1, valid=False), record(step=2, valid=True))
    two = parquet(tmp_path / "b.parquet", [record()])
    for paths, valid in (([one, two], [True, False, True, True]), ([two, one], [True, True, False, True])):
        assert rollouts.read(paths, wanted=["valid"]).valid == valid
    path = write(tmp_path / "c.jsonl", record(), record(step=1, valid=None))
    assert 'line 2, field "valid": expected true or false, got null' in error_of(path, wanted=["valid"])


def test_fingerprint_column(tmp_path):
    columns = rollouts.Columns(fingerprint="h")
    path = write(tmp_path / "a.jsonl", record(h=[1, 2.5]), record(h=[0, 1], step=1))
    assert rollouts.read([path], columns, needed=["fingerprint"]).fingerprint == [[1, 2.5], [0, 1]]
    for bad, part in (([], "list of numbers"), ([1, "x"], "list of numbers"), ([1], "2 numbers like"), (3, "got 3")):
        path = write(tmp_path / "b.jsonl", record(h=[1, 2]), record(h=bad, step=1))
        message = error_of(path, columns=columns, needed=["fingerprint"])
        assert part in message and "line 2" in message and 'field "h"' in message
    for huge, fact in ((10**400, "more than 256 bits"), (-(10**400), "256 bits"), (1e300, "1e+300"), (10**39, "1000")):
        path = write(tmp_path / "c.jsonl", record(h=[1, 2]), record(h=[1.0, huge], step=1))
        message = error_of(path, columns=columns, needed=["fingerprint"])
        assert f'{path}, line 2, field "h": expected a list of numbers that fit float32, got' in message
        assert fact in message
        (_, vector) = rollouts.read([path], columns, needed=["fingerprint"], allow_nonfinite=True).fingerprint or []
        assert np.float32(vector).tolist() == [1.0, np.inf if huge > 0 else -np.inf]


def parquet(path, records, **types):
    table = pa.Table.from_pylist(records)
    for name, kind in types.items():
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
    pq.write_table(table, path, row_group_size=3)
    return str(path)


def test_parquet_reads_as_json_lines(tmp_path):
    records = [record(step=i, reward=float(i), valid=i < 8, hidden=[float(i), 1.0]) for i in range(10)]
    columns = rollouts.Columns(fingerprint="hidden")
    names = ["action", "fingerprint", "valid", "success"]
    one = rollouts.read([parquet(tmp_path / "a.parquet", records)], columns, needed=names)
    two = rollouts.read([write(tmp_path / "a.jsonl", *records)], columns, needed=names)
    for name in ("task", "rollout", "step", "observation", "reward", "line", *names):
        assert getattr(one, name) == getattr(two, name), name
    assert one.where(3) == f"{tmp_path / 'a.parquet'}, row 4"
    types = {"reward": pa.float32(), "step": pa.int16(), "observation": pa.large_string()}
    assert rollouts.read([parquet(tmp_path / "b.parquet", records, **types)]).reward == two.reward


def test_bad_and_damaged_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", [record(), record(step=1, reward=None)])
    assert 'row 2, field "reward": expected a finite number, got null' in error_of(path)
    path = parquet(tmp_path / "b.parquet", [without("reward")])
    assert 'the column "reward" is missing' in error_of(path) and "--reward-column" in error_of(path)
    path = parquet(tmp_path / "long.parquet", [{f"{i} {'x' * 99}": 0 for i in range(30)}])
    assert error_of(path).endswith(" and 10 more.") and len(error_of(path)) < 1600
    table = pa.Table.from_pylist([record()])
    not_utf8 = pa.array([b"\xff"], pa.binary()).view(pa.string())
    for bad, message in (
        (table.set_column(2, "step", pa.array([0.0])), "expected an integer of at least 0, got 0.0"),
        (table.set_column(3, "observation", pa.array([b"x"])), "expected a string, got bytes"),
        (table.set_column(4, "reward", pa.array([float("nan")])), "got NaN"),
        (table.slice(0, 0), "holds no records"),
        (table.set_column(3, "observation", not_utf8), "not UTF-8"),
    ):
        pq.write_table(bad, tmp_path / "c.parquet")
        assert message in error_of(str(tmp_path / "c.parquet"))
    data = Path(path).read_bytes()
    for name, content in (("g", b""), ("h", b"PAR1"), ("i", data[: len(data) // 2]), ("j", b"x" * 100)):
        (tmp_path / f"{name}.parquet").write_bytes(content)
        assert "cannot be read as Parquet" in error_of(str(tmp_path / f"{name}.parquet"))
    pq.write_table(table, bad_page := tmp_path / "page.parquet", compression="none", write_page_checksum=True)
    bad_page.write_bytes(bad_page.read_bytes().replace(b"room", b"roof", 1))
    assert "CRC" in error_of(str(bad_page))
    pq.write_table(pa.Table.from_pylist([record(step=i) for i in range(50)]), bad_count := tmp_path / "count.parquet")
    data = bad_count.read_bytes()
    for at in [i for i, byte in enumerate(data) if byte == 100]:  # a count of 50, as footers write it
        bad_count.write_bytes(data[:at] + b"\x0e" + data[at + 1 :])
        assert isinstance(result := outcome(str(bad_count)), str) or len(result) == 50
    data = bytearray(Path(parquet(tmp_path / "a.parquet", [record(step=i) for i in range(50)])).read_bytes())
    random = np.random.default_rng(0)
    bad = tmp_path / "b.parquet"
    for _ in range(60):
        changed = bytearray(data)
        for at in random.integers(0, len(data), 3):
            changed[at] = random.integers(0, 256)
        bad.write_bytes(bytes(changed))
        result = outcome(str(bad))
        assert isinstance(result, rollouts.Rollouts) or str(bad) in result


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(GOOD)), value=json_values)
def test_any_value_of_a_field(tmp_path_factory, name, value):
    path = write(tmp_path_factory.mktemp("any") / "a.jsonl", record(), {**record(step=1), name: value})
    read = outcome(path, needed=["action"], wanted=["success"])
    if isinstance(read, str):
        assert f"{path}, line 2" in read and "\n" not in read
    else:
        assert len(read) == 2 and all(type(step) is int and 0 <= step < 2**63 for step in read.step)
        assert np.isfinite(read.reward).all()


@settings(max_examples=350, deadline=None)
@given(cut=st.just(0) | st.integers(0, 10_000), junk=st.binary(max_size=80), zipped=st.booleans())
def test_any_bytes_and_any_cut(tmp_path_factory, cut, junk, zipped):
    data = b"".join(json.dumps(record(step=i)).encode() + b"\n" for i in range(20))
    data = gzip.compress(data, mtime=0) if zipped else data
    path = tmp_path_factory.mktemp("any") / "a.jsonl.gz"
    path.write_bytes(data[: cut % len(data)] + junk)
    read = outcome(str(path))
    assert str(path) in read if isinstance(read, str) else 0 < len(read) <= 20 and cut > 0


@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.duration("ns"), pa.timestamp("ms")], ids=str)
def test_times_that_python_does_not_have(tmp_path, kind):
    path = tmp_path / "a.parquet"
    columns = {name: [GOOD[name]] for name in ("task_id", "rollout", "observation", "reward")}
    pq.write_table(pa.table({**columns, "step": pa.array([2**60 + 1], kind)}), path)
    try:  # with pandas, Arrow gives its types
        import pandas  # noqa: F401
    except ImportError:
        assert error_of(str(path)).startswith(f'{path}, field "step": its type {kind} cannot be read; write numbers')
    else:
        assert 'field "step": ' in error_of(str(path))


def test_millions_of_fields_are_refused_unread(tmp_path, monkeypatch):
    n = 3_000_000
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{" + b",".join(b'"k%d":0' % i for i in range(n)) + b"}\n")
    with monkeypatch.context() as unread:
        unread.setattr(rollouts.json, "loads", lambda *_, **__: pytest.fail("the line was parsed"))
        assert error_of(str(path)) == f"{path}, line 1: expected one record, got more than 100,000 fields."
    escaped = write(tmp_path / "b.jsonl", record(observation=json.dumps(dict.fromkeys(map(str, range(110_000)), 0))))
    assert len(rollouts.read([escaped])) == 1  # a text
    wide = tmp_path / "a.parquet"
    pq.write_table(pa.table({str(i): [0] for i in range(51)}), wide)
    monkeypatch.setattr(rollouts, "MOST_FIELDS", 50)
    assert "size limit" in error_of(str(wide))


@pytest.mark.parametrize("shape", ["2, " * 3_000_000, "(" * 3_000_000, "(" * 3_000, "2, " * 3_000, "2, -4000"])
def test_headers_of_fingerprints(tmp_path, shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header)
    refused(r"a\.npy cannot be read as a \.npy file", states.load_fingerprints, str(path), 2, error=CliError)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(CliError, match=r"a\.npy cannot be read as a \.npy file: it is not a regular file"):
        states.load_fingerprints(str(tmp_path / "a.npy"), 2)
