"""The CUDA kernels, compiled once a process for each kind of GPU: copies by table, and digests.

They read the structs of `boxes` (ENTRY, TILE) and `digests` (PIECE). NVRTC needs no GPU, and this file touches none.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from elastic_reshard.errors import ArenaError

__all__ = ["SOURCE", "THREADS", "compiled"]

THREADS: Final = 256

SOURCE: Final = r"""
typedef unsigned long long u64;
typedef unsigned int u32;

struct Entry { u64 target, source, target_step[4], source_step[4]; u32 size[4], mul[4], shift[4], width, dims; };
struct Tile { u32 entry, first, count, unused; };
struct Piece { u64 address, nbytes, start; };

static_assert(sizeof(Entry) == 136 && sizeof(Tile) == 16 && sizeof(Piece) == 24, "as numpy has them");

// Where an element lies in both arrays. Indices stay below 2**31.
template <int DIMS>
__device__ __forceinline__ void place(const Entry& e, u32 index, u64& target, u64& source) {
  target = e.target;
  source = e.source;
#pragma unroll
  for (int d = DIMS - 1; d > 0; --d) {
    u32 next = (__umulhi(index, e.mul[d]) + index) >> e.shift[d];
    u32 at = index - next * e.size[d];
    target += at * e.target_step[d];
    source += at * e.source_step[d];
    index = next;
  }
  target += index * e.target_step[0];
  source += index * e.source_step[0];
}

// Four loads of each thread are in flight before the first store.
template <typename T, int DIMS>
__device__ __forceinline__ void copy_tile(const Entry& e, u32 first, u32 count) {
  for (u32 begin = threadIdx.x; begin < count; begin += 4 * blockDim.x) {
    T held[4];
    u64 target[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      u32 i = begin + k * blockDim.x;
      if (i < count) {
        u64 source;
        place<DIMS>(e, first + i, target[k], source);
        held[k] = __ldcs(reinterpret_cast<const T*>(source));
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (begin + k * blockDim.x < count) __stcs(reinterpret_cast<T*>(target[k]), held[k]);
  }
}

// One block a tile, so that the device hands them out in order and all of it works on memory that lies together: 6 % faster
// than blocks that stay and take every n-th tile (H200).
extern "C" __global__ void __launch_bounds__(256) copy_table(const Entry* entries, const Tile* tiles) {
  __shared__ Entry e;
  const Tile tile = tiles[blockIdx.x];
  for (u32 i = threadIdx.x; i < sizeof(Entry) / 8; i += blockDim.x)
    reinterpret_cast<u64*>(&e)[i] = reinterpret_cast<const u64*>(entries + tile.entry)[i];
  __syncthreads();
  // Unused dims have one element each, so that four serve for all: only the usual width has code for fewer.
  switch (e.width == 16 ? e.dims : 8 * e.width) {
    case 1: copy_tile<uint4, 1>(e, tile.first, tile.count); break;
    case 2: copy_tile<uint4, 2>(e, tile.first, tile.count); break;
    case 3: copy_tile<uint4, 3>(e, tile.first, tile.count); break;
    case 4: copy_tile<uint4, 4>(e, tile.first, tile.count); break;
    case 64: copy_tile<u64, 4>(e, tile.first, tile.count); break;
    case 32: copy_tile<u32, 4>(e, tile.first, tile.count); break;
    case 16: copy_tile<unsigned short, 4>(e, tile.first, tile.count); break;
    default: copy_tile<unsigned char, 4>(e, tile.first, tile.count);
  }
}

// Word number `i` of a piece, padded with zeros behind its end.
__device__ __forceinline__ u64 word_of(const Piece& p, u64 i) {
  u64 at = p.address + 8 * i, left = p.nbytes - 8 * i;
  if (left >= 8 && at % 8 == 0) return *reinterpret_cast<const u64*>(at);
  u64 word = 0;
  for (int b = 0; b < 8 && b < left; ++b) word |= (u64)*reinterpret_cast<const unsigned char*>(at + b) << (8 * b);
  return word;
}

__device__ __forceinline__ u64 mixed(u64 word, u64 place) {
  u64 x = word ^ (place + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 33) * 0xFF51AFD7ED558CCDull;
  x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53ull;
  return x ^ x >> 33;
}

extern "C" __global__ void digest_begin(const Piece* pieces, u32 count, u64* out) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = pieces[i].start;
}

// gridDim.y blocks share a piece.
extern "C" __global__ void __launch_bounds__(256) digest_add(const Piece* pieces, u64* out) {
  Piece p = pieces[blockIdx.x];
  u64 words = (p.nbytes + 7) / 8, sum = 0;
  for (u64 i = blockIdx.y * blockDim.x + threadIdx.x; i < words; i += gridDim.y * blockDim.x) sum += mixed(word_of(p, i), i);
  for (int step = 16; step; step /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(out + blockIdx.x, sum);
}
"""


@cache
def compiled(arch: str) -> bytes:
    """The kernels' machine code for an architecture, such as "sm_90". About 0.3 s, once. ArenaError with NVRTC's words."""
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...], what: str) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise ArenaError(f"NVRTC: {what} failed: {result[0]!r}; cuda-bindings and nvidia-cuda-nvrtc must fit")
        return result[1] if len(result) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"elastic_reshard.cu", 0, [], []), "nvrtcCreateProgram")
    try:
        options = [f"-arch={arch}".encode(), b"--std=c++17"]
        done = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if done[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * int(checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
            checked(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            raise ArenaError(f"the kernels can't be compiled for {arch} ({done[0]!r}): {log.decode(errors='replace')}")
        code = b" " * int(checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)
