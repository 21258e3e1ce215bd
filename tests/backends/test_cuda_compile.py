"""The CUDA sources compile for every GPU of a release, by nvcc and by NVRTC, and no kernel spills registers."""

import re

import benchmarks
import pytest
from nvrtc import Nvrtc, library, needs_nvcc
from refusals import refused

from bipace_kernels.backends.cuda import _cupy, _launch

resources, report, sass = map(benchmarks.module, ("cuda_resources", "resources", "sass"))

SAID = """ptxas info    : (C7518) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
program dependence on compiler-inserted WG.DP in divergent path in the function 'one'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 4096 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
    64 bytes stack frame, 60 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 400 bytes cmem[0]
ptxas info    : Function properties for __internal_accurate_pow
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_words_of_ptxas_are_read():
    one, two = resources.parse("x.cu", SAID)
    assert one == resources.Kernel("x.cu", "one", "90a", 32, 0, 0, 0, 4096, serialized=True)
    assert two == resources.Kernel("x.cu", "two", "80", 255, 64, 60, 48, 0)
    assert two.spills and not one.spills
    assert "2 compiled configurations, 1 with spills" in report.as_markdown([one, two], "nvcc 13")
    refused(r"no kernel in x\.cu", resources.parse, "x.cu", "ptxas info    : 0 bytes gmem\n")


@needs_nvcc
def test_a_planted_spill_is_seen(tmp_path):
    source = tmp_path / "planted.cu"
    source.write_text("""
extern "C" __global__ void planted(float* x) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 64; ++i) x[(63 - i) * 32 + threadIdx.x] = kept[i] * kept[63 - i];
}""")
    (plain,) = resources.compile_source(source, 90)
    (capped,) = resources.compile_source(source, 90, ["-maxrregcount=24"])
    assert not plain.spills
    assert capped.spills and capped.stack > 0


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(report.SHARED_LIMIT))
def test_no_kernel_spills(arch):
    rows = resources.compile_all([arch], jobs=2)
    assert {row.kernel for row in rows} == set(_launch.kernels()) and not [row for row in rows if row.wrong]


@pytest.mark.slow
def test_nvrtc_compiles_every_source():
    """As CuPy does at first use, without headers of the host: NVRTC has none."""
    nvrtc = Nvrtc()
    for source in sorted((_launch.SOURCES / "cuda").glob("*.cu")):
        cubin = _cupy.compile_source(nvrtc, source, "sm_90a")
        assert cubin.startswith(b"\x7fELF"), source
        for name, kernel in _launch.kernels().items():
            assert (f".text.{name}\0".encode() in cubin) == (kernel.source == source.stem), name


def test_words_of_nvrtc_are_told(tmp_path):
    nvrtc, source = Nvrtc(), tmp_path / "wrong.cu"
    source.write_text("__global__ void wrong() { nonsense; }")
    with pytest.raises(RuntimeError, match=r'does not compile wrong\.cu for sm_90a.*\n.*"nonsense" is undefined'):
        _cupy.compile_source(nvrtc, source, "sm_90a")


# What stands in for each body of assembly on the CPU is the emulator's, so what the bodies say is read here: every
# instruction with the arguments in its places, as the PTX manual has them.
SUMS = ", ".join(f"c[{i}]" for i in range(64))
MMA = "{c[0],c[1],c[2],c[3]}, {a[0],a[1],a[2],a[3]}, {b0,b1}, {c[0],c[1],c[2],c[3]}"
ASSEMBLY = [
    "ld.shared.f32 value, [at]",
    "ld.shared.v2.f32 {x, y}, [at]",
    "ld.shared.v4.f32 {v[0], v[1], v[2], v[3]}, [at]",
    "st.shared.f32 [at], value",
    "st.shared.v2.f32 [at], {x, y}",
    "rsqrt.approx.ftz.f32 value, a",
    "rcp.approx.ftz.f32 value, a",
    "cvt.f32.f16 value, bits",
    "{.reg .b64 at; mad.wide.u32 at, row, bytes, first; ld.global.f32 value, [at];}",
    "cp.async.cg.shared.global [to], [from], 16, bytes",  # of 16 bytes the first ones are read, the rest are zeros
    "cp.async.commit_group",
    "cp.async.wait_group pending",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {out[0], out[1], out[2], out[3]}, [shared_address(row_in_shared)]",
    f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {MMA}",
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {MMA}",
    "fence.proxy.async.shared::cta",
    "",  # hold: nothing moves past it
    "wgmma.fence.sync.aligned",
    "wgmma.commit_group.sync.aligned",
    "wgmma.wait_group.sync.aligned pending",
    "{.reg .pred p; setp.ne.b32 p, static_cast<int>(add), 0; "
    f"wgmma.mma_async.sync.aligned.m64n128k16.f32.kind.kind {{{SUMS}}}, a, b, p, 1, 1, 0, 0;}}",
]
# And the functions that are one expression, which only a GPU calls.
PLAIN = """
int thread(): static_cast<int>(threadIdx.x); int lane(): static_cast<int>(threadIdx.x) % kWarp;
int warp(): static_cast<int>(threadIdx.x) / kWarp; int64_t block(): blockIdx.x; int64_t block_y(): blockIdx.y;
int64_t blocks(): gridDim.x; void sync_block(): __syncthreads(); void sync_warp(): __syncwarp();
uint32_t shared_address(const void* at): static_cast<uint32_t>(__cvta_generic_to_shared(at));
T shuffle(T value, int from): __shfl_sync(kAllLanes, value, from);
T shuffle_xor(T value, int mask): __shfl_xor_sync(kAllLanes, value, mask);
T shuffle_up(T value, int by): __shfl_up_sync(kAllLanes, value, by);
bool any(bool value): __any_sync(kAllLanes, value) != 0; uint32_t ballot(bool value): __ballot_sync(kAllLanes, value);
int32_t warp_max(int32_t value): __reduce_max_sync(kAllLanes, value); int count_bits(uint32_t bits): __popc(bits);
int count_below(uint32_t bits, int lane): __popc(bits & ((1u << lane) - 1u));
int lowest_bit(uint32_t bits): __ffs(static_cast<int>(bits)) - 1;
int highest_bit(uint32_t bits): 31 - __clz(static_cast<int>(bits));
uint64_t atomic_min(uint64_t* at, uint64_t value):
atomicMin(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
float fma_rn(float a, float b, float c): __fmaf_rn(a, b, c); float div_rn(float a, float b): __fdiv_rn(a, b);
float sqrt_rn(float a): __fsqrt_rn(a); uint32_t bits_of(float value): __float_as_uint(value);
float float_of(uint32_t bits): __uint_as_float(bits); int group(): __shfl_sync(kAllLanes, thread() / kGroup, 0)
"""


def assembly(source):
    """Each asm statement: its instructions without white space, each operand's expression in its place; whether it is
    volatile and may change memory; how operands are written, = or, where they are read too, +."""
    for volatile, statement in re.findall(r'\basm( volatile)?\(((?:[^;"]|"[^"]*")*)\)', source.replace("\\\n", "\n")):
        template = re.match(r'(?:\s*"[^"]*"|\s*kind)+', statement)[0]
        text = re.sub(r'["\s]|\\n', "", template)
        operands = re.findall(r'"[=+]?[a-z]"\(((?:[^()]|\([^()]*\))*)\)', statement[len(template) :])
        used = [int(i) for i in re.findall(r"%(\d+)", text)]
        assert not text or set(used) == set(range(len(operands))), statement
        text = re.sub(r"%(\d+)", lambda i, of=operands: of[int(i[1])], text).removesuffix(";")
        yield text, bool(volatile), '"memory"' in statement, set(re.findall(r'"([=+])[a-z]"\(', statement))


def test_every_body_of_assembly_is_what_the_emulator_stands_in_for():
    source = (_launch.SOURCES / "cuda/intrinsics.h").read_text()
    assert len(re.findall(r"\basm\b", source)) == len(ASSEMBLY)
    found = list(assembly(source))
    assert [text for text, *_ in found] == [text.replace(" ", "") for text in ASSEMBLY]
    for text, volatile, memory, written in found:
        assert volatile != text.startswith(("rsqrt", "rcp", "cvt", "{.reg.b64")), text  # which depend on operands alone
        assert memory == (volatile and not text.startswith("mma.")), text
        assert written <= {"+" if "mma" in text or not text else "="}, text
    dtypes = r'(?:if \((\w+)\)|else) \{\s+(?:asm volatile\(\s+"mma\S+?f32\.|BIPACE_MULTIPLY\(")(b?f16)'
    assert re.findall(dtypes, source) == [("bf16", "bf16"), ("", "f16")] * 2
    plain = re.findall(r"BIPACE_DEVICE ([^{;]*?) \{\s*(?:return )?([^{};]*);\s*\}", source)
    assert "; ".join(f"{head}: {body}" for head, body in plain if "asm" not in body) == " ".join(PLAIN.split())
    assert "constexpr int kWarp = 32;\nconstexpr uint32_t kAllLanes = 0xFFFFFFFFu;" in source


@needs_nvcc
@pytest.mark.slow
def test_hopper_gets_its_own_tensor_cores(tmp_path):
    """By nvcc and by NVRTC alike; no other architecture has their instructions."""
    pytest.importorskip("triton")  # whose cuobjdump serves where the toolkit has none
    source, cubins = _launch.SOURCES / "cuda/gram.cu", {by: tmp_path / f"{by}.cubin" for by in ("90a", "100")}
    for capability, cubin in zip(((9, 0), (10, 0)), cubins.values(), strict=True):
        resources.to_cubin(source, capability, cubin)
    if library() is not None:
        cubins["NVRTC"] = tmp_path / "nvrtc.cubin"
        cubins["NVRTC"].write_bytes(_cupy.compile_source(Nvrtc(), source, _cupy.target((9, 0))))
    of_gram = [name for name, kernel in _launch.kernels().items() if kernel.source == "gram"]
    code = {(kernel, by): {one.kind for one in sass.read(cubins[by], kernel)} for kernel in of_gram for by in cubins}
    with_them = {key for key, kinds in code.items() if "HGMMA" in kinds}
    assert with_them == {("gram_tall", by) for by in ("90a", "NVRTC") if by == "90a" or library() is not None}
    assert "HMMA" in code["gram_half", "100"]
