"""What stands in for a GPU: it does what kernels rely on, and finds what would hang or be undefined on one."""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.host_cuda.modules import HostKernel, compile_module, without_ptx

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(96) sums(const unsigned* values, unsigned* out, unsigned n) {
  __shared__ unsigned of_warps[3];
  const unsigned i = threadIdx.x;
  const unsigned warp = __reduce_add_sync(0xffffffffu, i < n ? values[i] : 0);
  const unsigned up = __shfl_up_sync(0xffffffffu, i, 1), down = __shfl_down_sync(0xffffffffu, i, 1);
  if (i % 32 == 0) of_warps[i / 32] = warp;
  if (i >= 64) return;  // who has left is not waited for
  __syncthreads();
  if (i % 32 >= 16 && n == 0) return;
  out[i] = of_warps[0] + of_warps[1];
  out[64 + i] = up;
  out[128 + i] = down;
  out[192 + i] = __ballot_sync(0xffffffffu, i % 3 == 0);
}

extern "C" __global__ void apart(unsigned* out) {
  if (threadIdx.x < 16)
    __syncthreads();
  else
    __syncwarp();
  out[threadIdx.x] = 1;
}

extern "C" __global__ void last_block(unsigned* finished, unsigned* out, float scale) {
  __shared__ bool last;
  if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == gridDim.x * gridDim.y - 1;
  __syncthreads();
  if (last) out[threadIdx.x] = blockIdx.x + 10 * blockIdx.y + static_cast<unsigned>(scale);
}

extern "C" __global__ void vectors(const float* values, float* out) {
  __stcs(reinterpret_cast<float4*>(out), __ldcs(reinterpret_cast<const float4*>(values)));
}
"""


def run(name: str, blocks: int, rows: int, threads: int, *values: Any) -> int:
    kernel: HostKernel = compile_module(SOURCE, ()).kernel(name)
    assert len(values) == kernel.arguments
    places = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
    return kernel.run(blocks, rows, threads, (ctypes.c_void_p * len(places))(*places))


def pointer(array: NDArray[np.uint32]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def test_warps_and_blocks_exchange_what_they_should() -> None:
    values, out = np.arange(96, dtype=np.uint32) ** 2, np.zeros(256, np.uint32)
    assert run("sums", 1, 1, 96, pointer(values), pointer(out), ctypes.c_uint(70)) == 0
    lanes = np.arange(64)
    votes = [sum(1 << lane for lane in range(32) if (warp + lane) % 3 == 0) for warp in (0, 32)]
    assert (out[:64] == values[:64].sum()).all()
    assert out[64:128].tolist() == [i if i % 32 == 0 else i - 1 for i in lanes]
    assert out[128:192].tolist() == [i if i % 32 == 31 else i + 1 for i in lanes]
    assert out[192:].tolist() == [votes[i // 32] for i in lanes]
    out[:] = 0
    assert run("sums", 1, 1, 96, pointer(values), pointer(out), ctypes.c_uint(0)) == 0
    assert out[192:].tolist() == [votes[i // 32] & 0xFFFF if i % 32 < 16 else 0 for i in lanes]


def test_threads_that_wait_at_different_places_are_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("apart", 1, 1, 32, pointer(np.zeros(32, np.uint32))) == 719
    assert "threads wait for each other at different places" in capfd.readouterr().err


def test_blocks_come_in_order_and_arguments_by_type() -> None:
    finished, out = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    assert run("last_block", 3, 2, 32, pointer(finished), pointer(out), ctypes.c_float(100.5)) == 0
    assert finished[0] == 6
    assert (out == 2 + 10 + 100).all()


def test_vectors_are_found_at_their_multiples_alone() -> None:
    values, out = np.arange(96, dtype=np.uint32), np.zeros(64, np.uint32)
    first = -(values.ctypes.data // 4) % 4
    to = out[-(out.ctypes.data // 4) % 4 :]
    assert run("vectors", 1, 1, 1, pointer(values[first:]), pointer(to)) == 0
    assert to[:4].tolist() == values[first : first + 4].tolist()
    for where, target in ((values[first + 2 :], to), (values[first:], to[1:])):
        assert run("vectors", 1, 1, 1, pointer(where), pointer(target)) == 716


def test_assembly_becomes_calls() -> None:
    assert without_ptx('asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));') == (
        "sum = ptx_add_rn_f32(a, b);"
    )
    store = 'asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");'
    assert without_ptx(store) == "ptx_st_release_sys_global_u32(flag, epoch);"
