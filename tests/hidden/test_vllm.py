"""The reader against files in the format of vLLM's connector, and the arguments that enable it.

vLLM itself is not run; `vllm_stand_in` says where its format was read.
"""

import json
import os
import threading
from pathlib import Path

import pytest
import tiny_models as tm
import torch
import vllm_stand_in as engine
from refusals import refused

import bipace_kernels as bk

Extraction = bk.hidden.vllm.Extraction


def states(n_tokens, n_layers=1, width=24, *, dtype=torch.bfloat16, seed=0):
    return torch.randn((n_tokens, n_layers, width), generator=torch.Generator().manual_seed(seed)).to(dtype)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_arguments_are_those_of_vllms_page(tmp_path):
    found = Extraction(28, tmp_path, layers=[-8, "block 16"])
    assert found.engine_arguments() == {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [17, 21]}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    }
    options = found.serve_arguments()
    assert options[::2] == ["--speculative-config", "--kv-transfer-config"]
    assert [json.loads(text) for text in options[1::2]] == list(found.engine_arguments().values())
    assert "block 16 (hidden_states[17] = [−12])" in repr(found)


def test_wrong_arguments_are_named_and_the_number_of_blocks_comes_from_a_folder(tmp_path):
    for given, message in (
        ({"layer": -1}, "layer −1 is after the final norm.*take 'block 8'"),
        ({"layer": 12}, "layer must be an index into hidden_states"),
        ({"layers": []}, r"layers must be a list of layers, e.g. \[-8, -12\], got \[\]"),
        ({"layers": "block 3"}, "layers must be a list of layers"),
        ({"model": 0}, "model must be an int of at least 1, got 0"),
        ({"model": "Qwen/Qwen2.5-7B"}, "model must be the number of blocks or a folder with config.json"),
        ({"model": None}, "model, unless it is a number of blocks, must be a path, got NoneType"),
        ({"folder": 3}, "folder must be a path, got int"),
        ({"timeout_s": -1}, "timeout_s must be a number of seconds of at least 0, got -1"),
    ):
        refused(message, Extraction, error=(TypeError, ValueError), **{"model": 9, "folder": tmp_path, **given})
    (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 12}, "num_hidden_layers": 3}')
    assert Extraction(tmp_path, tmp_path).layers == Extraction(12, tmp_path).layers
    (tmp_path / "config.json").write_text("{}")
    refused(r"config.json has no num_hidden_layers; pass the number", Extraction, str(tmp_path), tmp_path)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tm.make().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("include", [False, True])
def test_rows_are_those_of_an_early_exit(tmp_path, model_folder, include):
    """Layers mean the same in vLLM's numbers, and the row is the last prompt token's whatever else a file holds."""
    ids, mask = tm.prompts(4, 11)
    prompts = [{"prompt_token_ids": row[keep.bool()].tolist()} for row, keep in zip(ids, mask, strict=True)]
    sampling = engine.SamplingParams(extra_args={"kv_transfer_params": {"include_output_tokens": include}})
    layers = ["block 8", -3, -8]
    found = Extraction(model_folder, tmp_path, layers=layers, keep=False)
    outputs = engine.LLM(str(model_folder), **found.engine_arguments()).generate(prompts, sampling)
    rows = found.read_layers(outputs)
    expected = bk.hidden.extract_layers(tm.make(), ids, mask, layers)
    assert set(rows) == {layer for layer, _ in expected}
    for (layer, _), wanted in expected.items():
        assert torch.allclose(tm.unit(rows[layer]), tm.unit(wanted), atol=1e-5, rtol=0), layer
    assert names(tmp_path) == []
    refused("read\\(\\) returns one layer, but there are 3; use read_layers", found.read, outputs)


def test_files_of_all_samples_go_and_one_never_written_does_not_hold_up_the_rows(tmp_path, model_folder):
    """vLLM only reports the path of one sample of a request, but each of them has written a file."""
    found = Extraction(model_folder, tmp_path, keep=False)
    llm = engine.LLM(str(model_folder), **found.engine_arguments())
    outputs = llm.generate([{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [5, 6, 9]}], engine.SamplingParams(n=3))
    engine.write(tmp_path / "0_another.safetensors", states(2), [5, 6], lock=False)
    assert len(names(tmp_path)) == 13 and found.read(outputs).shape == (2, 48)
    assert names(tmp_path) == ["0_another.safetensors"]
    path = tmp_path / "1_7.safetensors"
    engine.write(path, states(2), [5, 6])
    rows = Extraction(9, tmp_path, keep=False, timeout_s=0.02).read([engine.output(path, [5, 6], n=2)])
    assert torch.equal(rows, states(2)[-1:, 0]) and names(tmp_path) == ["0_another.safetensors"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("keep", [False, True])
def test_bits_and_files(tmp_path, dtype, keep):
    stored = [states(n, dtype=dtype, seed=n) for n in (5, 1, 3)]
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, state in zip(paths, stored, strict=True):
        engine.write(path, state, range(len(state)))
    found = Extraction(9, tmp_path, keep=keep)
    rows = found.read([engine.output(paths[i], range(len(stored[i]))) for i in (2, 0, 2, 1)])
    assert rows.dtype == dtype and torch.equal(rows, torch.stack([stored[i][-1, 0] for i in (2, 0, 2, 1)]))
    assert len(names(tmp_path)) == (6 if keep else 0)
    if keep:
        as_dicts = [vars(engine.output(path)) for path in paths]
        assert torch.equal(found.read(as_dicts), found.read(paths))
        shorter = torch.stack([stored[0][1, 0], stored[1][0, 0], stored[2][0, 0]])
        assert torch.equal(found.read(paths, [2, 1, 1]), shorter)


def test_only_the_row_is_read(tmp_path):
    path = tmp_path / "0.safetensors"
    engine.write(path, states(4096, 2, 1024), range(4096))
    assert path.stat().st_size > 16 << 20
    found = Extraction(9, tmp_path, layers=[-8, -4])

    def bytes_read():
        return int(Path("/proc/thread-self/io").read_text().split()[1])

    before = bytes_read()
    found.read_layers([path], [2000])
    assert bytes_read() - before < 64 << 10 and str(path) not in Path("/proc/self/maps").read_text()


def test_waits_for_what_is_being_written(tmp_path):
    path, stored = tmp_path / "0.safetensors", states(4)
    held = engine.locked(path)

    def finish():
        engine.write(path, stored, range(4), lock=False)
        os.close(held)

    threading.Timer(0.15, finish).start()
    assert torch.equal(Extraction(9, tmp_path, timeout_s=20).read([path]), stored[-1:, 0])


def test_a_locked_file_is_not_read_though_it_is_whole_and_without_locks_the_size_tells(tmp_path):
    path = tmp_path / "0.safetensors"
    held = engine.locked(path)
    engine.write(path, states(4), range(4), lock=False)
    found = Extraction(9, tmp_path, timeout_s=0.03)
    with pytest.raises(TimeoutError, match=r"0.safetensors was not complete after 0.03 s: vLLM still holds its lock"):
        found.read([path])
    assert list(found.follow()) == []
    os.close(held)
    assert len(list(found.follow())) == 1
    whole, path = tmp_path / "whole", tmp_path / "0.safetensors"
    engine.write(whole, states(4), range(4), lock=False)
    data = whole.read_bytes()
    found = Extraction(9, tmp_path, timeout_s=0)
    for size in (0, 5, 40, len(data) - 1):
        path.write_bytes(data[:size])
        refused(f"it is cut off .*{size}", found.read, [path], error=TimeoutError)
    path.write_bytes(data)
    assert torch.equal(found.read([path]), states(4)[-1:, 0])


def test_a_failed_call_removes_nothing(tmp_path):
    good, lost = tmp_path / "0.safetensors", tmp_path / "1.safetensors"
    engine.write(good, states(4), range(4))
    found = Extraction(9, tmp_path, keep=False, timeout_s=0)
    with pytest.raises(TimeoutError, match=r"1.safetensors was not complete.*there is no such file; read on vLLM"):
        found.read([good, lost])
    os.close(engine.locked(lost))
    with pytest.raises(TimeoutError, match="released its lock without writing the file: the request was aborted"):
        found.read([good, lost])
    assert "0.safetensors" in names(tmp_path)
    engine.write(lost, states(3), range(3))
    assert found.read([good, lost]).shape == (2, 24) and names(tmp_path) == []


@pytest.mark.parametrize("how", ["absolute", "dots", "link", "link into it"])
def test_only_files_of_its_folder_are_removed(tmp_path, how):
    folder, other = tmp_path / "states", tmp_path / "other.safetensors"
    folder.mkdir()
    engine.write(other, states(4), range(4), lock=False)
    inside = folder / "0.safetensors"
    path = {"absolute": other, "dots": folder / ".." / other.name}.get(how, inside)
    if how == "link":
        inside.symlink_to(other)
    if how == "link into it":
        other.rename(inside)
        other.symlink_to(inside)
        path = other
    with pytest.raises(ValueError, match=r"must be in .*states after resolving symbolic links.*keep=True"):
        Extraction(9, folder, keep=False).read([engine.output(path, range(4))])
    assert other.exists()
    assert torch.equal(Extraction(9, folder).read([engine.output(path, range(4))]), states(4)[-1:, 0])
    assert other.exists()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_folder_or_pipe_is_refused_at_once_and_no_descriptor_stays_open(tmp_path, make):
    make(tmp_path / "0.safetensors")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        refused(r"0.safetensors must be a regular file", Extraction(9, tmp_path).read, [tmp_path / "0.safetensors"])
    assert os.listdir("/proc/self/fd") == before


ENTRY = '{"dtype": "%s", "shape": %s, "data_offsets": %s}'
GOOD = {"hidden_states": ENTRY % ("F32", "[4, 1, 2]", "[0, 32]"), "token_ids": ENTRY % ("I64", "[4]", "[32, 64]")}


def test_hostile_headers_are_refused(tmp_path):
    for change in (
        {"hidden_states": ENTRY % ("F32", "[4, 1, 2]", "[-32, 0]")},
        {"hidden_states": ENTRY % ("F32", "[-4, -1, 2]", "[0, 32]")},
        {"hidden_states": ENTRY % ("F32", "[4, 1, Infinity]", "[0, 32]")},
        {"hidden_states": ENTRY % ("F32", "[4, 1, 2]", "[0, Infinity]")},
        {"hidden_states": ENTRY % ("F32", "[4.0, 1, 2]", "[0, 32]")},
        {"hidden_states": ENTRY % ("F32", "[4, 1, " + "9" * 30 + "]", "[0, " + "9" * 30 + "]")},
        {"hidden_states": ENTRY % ("F32", "[" + "2, " * 300_000 + "2]", "[0, 32]")},
        {"hidden_states": ENTRY % ("F32", "[" + "2, " * 3_000_000 + "2]", "[0, 32]")},
        {"hidden_states": "[" * 100_000},
        {"more": ENTRY % ("F32", "[1]", "[NaN, Infinity]")},
        {"more": "3"},
    ):
        header = "{" + ", ".join(f'"{name}": {text}' for name, text in {**GOOD, **change}.items()) + "}"
        path = tmp_path / "0.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))
        read, what = Extraction(9, tmp_path, timeout_s=0).read, "safetensors file of vLLM's connector: hidden_states"
        said = refused(f"must be a {what}", read, [path])
        unread = len(header) > bk.hidden.vllm.LONGEST_HEADER  # parsing millions of dimensions would take a minute
        assert (f"a header of {len(header)} bytes" in said) == unread and len(said) < 1000


def test_files_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "0.safetensors"
    for stored, prompt, message in (
        (states(4, 2), range(4), "0.safetensors holds 2 layers, not 1: start it"),
        (states(3), range(4), "states of 3 tokens and 4 token ids for a prompt of 4: .*enable_prefix_caching=False"),
        (states(4), range(5), "holds states of 4 tokens and 4 token ids for a prompt of 5"),
        (states(4), (0, 1, 2, 9), "0.safetensors is of another request"),
        (states(4)[:, 0], range(4), r"must be a safetensors file .* connector: hidden_states \[tokens, layers, D\]"),
        (states(4).double(), range(4), "must be a safetensors file .*KeyError"),
    ):
        engine.write(path, stored, range(4))
        refused(message, Extraction(9, tmp_path).read, [engine.output(path, prompt)])
        assert path.exists()


def test_other_files_and_widths_are_refused(tmp_path):
    found = Extraction(9, tmp_path, timeout_s=0)
    path = tmp_path / "0.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + bytes(64))
    refused("a header of 4611686018427387904 bytes", found.read, [path])
    path.write_bytes((4).to_bytes(8, "little") + b"none")
    refused("must be a safetensors file of vLLM's connector", list, found.follow())
    engine.write(path, states(4), range(4))
    engine.write(tmp_path / "1.safetensors", states(4, width=8), range(4))
    refused(r"1.safetensors has width 8, .*0.safetensors 24", found.read, sorted(tmp_path.glob("*.safetensors")))


def test_outputs_that_do_not_fit_are_named(tmp_path):
    for outputs, lengths, kind, message in (
        ([{"kv_transfer_params": None}], None, ValueError, r"outputs\[0\] must have kv_transfer_params .*None in dict"),
        ([object()], None, ValueError, "start the engine with engine_arguments"),
        ([], None, TypeError, "outputs must be a list of finished requests"),
        ("0.safetensors", None, TypeError, "outputs must be a list of finished requests or paths, got str"),
        (["0.safetensors"], [1, 2], ValueError, "prompt_lengths"),
        ([engine.output(Path("x"), range(4))], [3], ValueError, r"prompt_lengths\[0\] is 3, but the output has .* 4"),
    ):
        refused(message, Extraction(9, tmp_path).read, outputs, lengths, error=kind)


def test_following_a_folder(tmp_path):
    found = Extraction(9, tmp_path, layers=[-8, -4], keep=False, timeout_s=20)
    stored = {f"{i}-abcd": states(i + 2, 2, seed=i) for i in range(5)}

    def write():
        for name, state in stored.items():
            engine.write(tmp_path / f"{name}.safetensors", state, range(len(state)))

    writer = threading.Timer(0.05, write)
    writer.start()
    rows = dict(found.follow(5))
    writer.join()
    assert rows.keys() == stored.keys()
    for name, row in rows.items():
        assert torch.equal(row, stored[name][-1])
    assert names(tmp_path) == []


def test_following_stops_where_nothing_comes(tmp_path):
    found = Extraction(9, tmp_path, timeout_s=0.05)
    for i in range(2):
        engine.write(tmp_path / f"{i}.safetensors", states(2), range(2))
    assert [name for name, _ in found.follow(1)] == ["0"]
    assert [name for name, _ in found.follow()] == ["0", "1"]  # files stay, and are there again
    refused("count must be an int of at least 0, got -1", next, found.follow(-1))
    rest = found.follow(3)
    assert [next(rest)[0], next(rest)[0]] == ["0", "1"]
    refused(r"2 of 3 files came into .*, none for 0.05 s; see its log", next, rest, error=TimeoutError)
    assert len(names(tmp_path)) == 4
