"""Arrays of other libraries go into bk.advantage() without a copy, and results come back as what came in."""

import operator
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import CONFIGS, OUTPUTS, make_batch
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.inputs import interop


class Array:
    """What an array of another library is to us: DLPack, and nothing else."""

    __module__ = "foreign"

    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        raise AssertionError("it was read before it became a tensor")

    def __dlpack__(self, **how):
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.fixture(autouse=True)
def _foreign(monkeypatch):
    """As CuPy and JAX have it: the library of an array is the module of its type."""
    library = SimpleNamespace(from_dlpack=lambda value: Array(torch.from_dlpack(value)))
    monkeypatch.setitem(sys.modules, "foreign", library)


class OnlyInterface:
    """As of Numba's device arrays."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


def arguments():
    return {
        name: torch.as_tensor(value) if isinstance(value, (np.ndarray, list)) and name != "observation" else value
        for name, value in make_batch(3).arguments().items()
    }


def test_arrays_go_in_and_come_back():
    given, config = arguments(), CONFIGS["bipace"]
    expected = bk.advantage(config=config, **given)
    foreign = {name: Array(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    result = bk.advantage(config=config, **foreign)
    for name in OUTPUTS:
        got = getattr(result, name)
        assert isinstance(got, Array), name
        assert torch.equal(got.tensor, getattr(expected, name)), name
        assert got.tensor.data_ptr() == getattr(result.tensors, name).data_ptr(), "shared, not copied"
    assert result.metrics() == expected.metrics() and result.value_r2() == expected.value_r2()
    result.check()


def test_the_fingerprint_decides_then_rewards_then_returns():
    given, config = arguments(), CONFIGS["bipace"]
    foreign = {name: Array(given[name]) for name in ("fingerprint", "rewards")}
    tensor, array = torch.Tensor, Array
    for own, kind in ((("fingerprint",), array), (("rewards",), tensor), (("fingerprint", "rewards"), array)):
        result = bk.advantage(config=config, **{**given, **{name: foreign[name] for name in own}})
        assert isinstance(result.advantage, kind), own
    without = {name: value for name, value in given.items() if name != "fingerprint"}
    plain = bk.Config.grpo()
    assert isinstance(bk.advantage(config=plain, **{**without, "rewards": foreign["rewards"]}).advantage, Array)
    by_numpy = {**without, "rewards": given["rewards"].numpy(), "group": Array(given["group"])}
    assert isinstance(bk.advantage(config=plain, **by_numpy).advantage, torch.Tensor)
    episode_return = torch.zeros(len(given["rewards"]))
    returns = {"rewards": None, "returns": Array(given["rewards"]), "episode_return": episode_return}
    assert isinstance(bk.advantage(config=plain, **{**without, **returns}).advantage, Array)


def test_other_functions_take_them_and_give_tensors():
    given = arguments()
    ids = [Array(given[name]) for name in ("group", "trajectory", "step")]
    layout = bk.layout(*ids)
    assert torch.equal(layout.order, bk.layout(given["group"], given["trajectory"], given["step"]).order)
    labels = bk.cluster(Array(given["fingerprint"]), ids[0], 0.1, trajectory=ids[1], step=ids[2])
    assert torch.equal(labels, bk.cluster(given["fingerprint"], layout=layout))
    returns = bk.discounted_returns(Array(given["rewards"]), ids[1], 0.9, step=ids[2])
    assert torch.equal(returns, bk.discounted_returns(given["rewards"], given["trajectory"], 0.9, step=given["step"]))
    mask = torch.ones(len(returns), 2)
    assert torch.equal(bk.to_tokens(Array(returns), Array(mask)), bk.to_tokens(returns, mask))


def test_what_torch_cannot_read_is_named():
    class Broken(Array):
        def __dlpack__(self, **how):
            raise BufferError("the memory is elsewhere")

    with pytest.raises(TypeError, match=r"rewards must be an array .* got Broken: the memory is elsewhere"):
        bk.advantage([0], [0], Broken(torch.zeros(1)), config=bk.Config.grpo())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where torch sees no GPU")
def test_the_cuda_array_interface_is_read_and_has_no_way_back():
    value = OnlyInterface()
    assert interop.is_interop_array(value)
    assert interop.from_dlpack_of({"fingerprint": value, "rewards": None, "returns": None}) is None
    refused("rewards must be an array that torch can read", interop.to_torch, value, "rewards", error=TypeError)


def test_what_numpy_reads_is_read_by_numpy():
    pyarrow = pytest.importorskip("pyarrow")
    for value in (np.zeros(3), np.float32(1), [0.0], "text", None, torch.zeros(3), pyarrow.array([1, 2]), 7):
        assert not interop.is_interop_array(value), value


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "jax", "numba"])
def test_arrays_of_a_gpu(name, monkeypatch):
    """In and out without a copy; the rest of the arguments are tensors of the same GPU, and ids of the host."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU's memory
    library = pytest.importorskip({"numba": "numba.cuda"}.get(name, name), reason=f"needs {name}")
    to_library = {"cupy": "from_dlpack", "jax": "numpy.from_dlpack", "numba": "as_cuda_array"}[name]
    given, config, ids = arguments(), CONFIGS["bipace"], ("group", "trajectory", "step")
    given = {n: value.numpy() if n in ids else value.cuda() if isinstance(value, torch.Tensor) else value
             for n, value in given.items()}  # fmt: skip
    expected = bk.advantage(config=config, **given)
    array = operator.attrgetter(to_library)(library)(given["fingerprint"])
    assert interop.to_torch(array, "fingerprint").data_ptr() == given["fingerprint"].data_ptr()
    result = bk.advantage(config=config, **{**given, "fingerprint": array})
    for field in OUTPUTS:
        got = getattr(result, field)
        assert isinstance(got, torch.Tensor if name == "numba" else type(array)), field
        assert torch.equal(interop.to_torch(got, field), getattr(expected, field)), field
    assert result.metrics() == expected.metrics()
