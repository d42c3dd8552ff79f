// How fast K and V of (batch, keys, heads, row) can be read once into rings in shared memory, by how they are asked for.
//     nvcc -O3 -arch=sm_90a -std=c++17 -o reads run22_reads.cu && ./reads
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CHECK(x)                                                                                    \
  do {                                                                                              \
    cudaError_t error_ = (x);                                                                       \
    if (error_ != cudaSuccess) {                                                                    \
      printf("%s, line %d\n", cudaGetErrorString(error_), __LINE__);                                \
      exit(1);                                                                                      \
    }                                                                                               \
  } while (0)

struct Cache {
  const char *k, *v;
  int batch, keys, heads;
};

__device__ uint32_t shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// The tiles of a CTA: of one head, or an even share of all. `tiles` is of a head.
__device__ void share(bool whole, long tiles, long heads, long &pos, long &end) {
  pos = whole ? blockIdx.x * tiles : tiles * heads * blockIdx.x / gridDim.x;
  end = whole ? pos + tiles : tiles * heads * (blockIdx.x + 1) / gridDim.x;
}

enum Hint { NONE, L128, L256, ZEROS };  // ZEROS: with a size operand, as where a sequence ends
constexpr int WARPS = 4, KEYS = 16;     // KEYS of K and of V a step and warp

template <Hint HINT>
__device__ void copy16(uint32_t to, const char *from, int size) {
  if (HINT == NONE) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
  if (HINT == L128) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
  if (HINT == L256) asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from));
  if (HINT == ZEROS)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size));
}

template <int ROW, int STAGES, Hint HINT, int GAP, bool LOADS>
__global__ void __launch_bounds__(WARPS * 32) by_copies(Cache c, bool whole, int wait, unsigned *sink) {
  extern __shared__ __align__(128) char smem[];
  constexpr int PITCH = ROW + GAP, STAGE = 2 * KEYS * PITCH, LANES = ROW / 16, ROWS = 32 / LANES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = c.keys / (KEYS * WARPS);
  const uint32_t ring = shared(smem) + warp * STAGES * STAGE;
  const size_t step = (size_t)c.heads * ROW;
  unsigned seen = 0;
  long pos, end;
  share(whole, tiles, (long)c.batch * c.heads, pos, end);
  while (pos < end) {
    const long head = pos / tiles;
    const int first = pos % tiles, count = std::min((long)tiles - first, end - pos);
    int key = (first * WARPS + warp) * KEYS + lane / LANES;
    const size_t at = ((head / c.heads) * c.keys + key) * step + (head % c.heads) * ROW + lane % LANES * 16;
    const char *k = c.k + at, *v = c.v + at;
    auto fetch = [&](int stage) {
      uint32_t to = ring + stage * STAGE + lane / LANES * PITCH + lane % LANES * 16;
#pragma unroll
      for (int r = 0; r < KEYS; r += ROWS)
        copy16<HINT>(to + r * PITCH, k + r * step, key + r < c.keys ? 16 : 0);
#pragma unroll
      for (int r = 0; r < KEYS; r += ROWS)
        copy16<HINT>(to + (KEYS + r) * PITCH, v + r * step, key + r < c.keys ? 16 : 0);
      k += KEYS * WARPS * step, v += KEYS * WARPS * step, key += KEYS * WARPS;
    };
    for (int i = 0; i < STAGES - 1; i++) {
      if (i < count) fetch(i);
      asm volatile("cp.async.commit_group;");
    }
    for (int i = 0; i < count; i++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
      __syncwarp();
      if (i + STAGES - 1 < count) fetch((i + STAGES - 1) % STAGES);
      asm volatile("cp.async.commit_group;");
      const uint32_t from = ring + i % STAGES * STAGE + lane % 16 * PITCH + lane / 16 * 16;
      if (LOADS)
#pragma unroll
        for (int j = 0; j < 2 * (ROW / 32); j++) {
          unsigned a, b, x, y;
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(a), "=r"(b), "=r"(x), "=r"(y)
                       : "r"(from + j / (ROW / 32) * KEYS * PITCH + j % (ROW / 32) * 32));
          seen ^= a ^ b ^ x ^ y;
        }
      for (long long start = clock64(); clock64() - start < wait;) {
      }
    }
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    pos += count;
  }
  if (seen == 0x12345) *sink = seen;  // so that the loads stay
}

// TMA: one thread; a stage is `KEYS_TMA` keys of K or of V, in boxes of BOX bytes of a row.
template <int ROW, int KEYS_TMA, int STAGES, int BOX>
__global__ void by_tma(Cache c, bool whole, const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v) {
  extern __shared__ __align__(128) char smem[];
  __shared__ __align__(8) uint64_t full[STAGES];
  if (threadIdx.x != 0) return;
  for (auto &x : full) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared(&x)));
  asm volatile("fence.mbarrier_init.release.cluster;");
  const uint32_t ring = (shared(smem) + 1023) & ~1023u;
  const int tiles = c.keys / KEYS_TMA;
  long pos, end;
  share(whole, tiles, (long)c.batch * c.heads, pos, end);
  const long count = 2 * (end - pos);
  auto fetch = [&](long i) {
    const long tile = pos + i / 2, head = tile / tiles;
    const uint32_t bar = shared(&full[i % STAGES]), to = ring + i % STAGES * KEYS_TMA * ROW;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(KEYS_TMA * ROW));
    for (int b = 0; b < ROW / BOX; b++)
      asm volatile(
          "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
              to + b * KEYS_TMA * BOX),
          "l"(i % 2 ? &v : &k), "r"(b * BOX / 2), "r"((int)(head % c.heads)),
          "r"((int)(head / c.heads * c.keys + tile % tiles * KEYS_TMA)), "r"(bar)
          : "memory");
  };
  for (long i = 0; i < STAGES && i < count; i++) fetch(i);
  for (long i = 0; i < count; i++) {
    uint32_t done = 0;
    while (!done)
      asm volatile("{.reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"
                   : "=r"(done)
                   : "r"(shared(&full[i % STAGES])), "r"((uint32_t)(i / STAGES & 1)));
    if (i + STAGES < count) fetch(i + STAGES);
  }
}

__global__ void fill(uint32_t *x, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    x[i] = (uint32_t)i * 2654435761u;
}

using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                            const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
Encode encode;

CUtensorMap map_of(const char *base, Cache c, int row, int box, int keys, CUtensorMapL2promotion promotion) {
  CUtensorMap map;
  cuuint64_t dims[] = {(cuuint64_t)row / 2, (cuuint64_t)c.heads, (cuuint64_t)c.batch * c.keys};
  cuuint64_t strides[] = {(cuuint64_t)row, (cuuint64_t)row * c.heads};
  cuuint32_t boxes[] = {(cuuint32_t)box / 2, 1, (cuuint32_t)keys}, ones[] = {1, 1, 1};
  auto swizzle = box == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)base, dims, strides, boxes, ones,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    printf("no tensor map\n"), exit(1);
  return map;
}

template <int ROW, Hint HINT, int GAP, bool LOADS>
void copies(Cache c, bool whole, int ctas, int wait) {
  constexpr int STAGES = ROW == 512 ? 3 : 6, BYTES = WARPS * STAGES * 2 * KEYS * (ROW + GAP);
  auto kernel = by_copies<ROW, STAGES, HINT, GAP, LOADS>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
  kernel<<<whole ? c.batch * c.heads : ctas, WARPS * 32, BYTES>>>(c, whole, wait, nullptr);
}

template <int ROW, int BOX>
void boxes(Cache c, bool whole, int ctas, CUtensorMapL2promotion promotion) {
  constexpr int KEYS_TMA = 64 * 512 / ROW, STAGES = 6, BYTES = STAGES * KEYS_TMA * ROW + 1024;
  auto kernel = by_tma<ROW, KEYS_TMA, STAGES, BOX>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
  auto k = map_of(c.k, c, ROW, BOX, KEYS_TMA, promotion), v = map_of(c.v, c, ROW, BOX, KEYS_TMA, promotion);
  kernel<<<whole ? c.batch * c.heads : ctas, 32, BYTES>>>(c, whole, k, v);
}

template <int ROW>
void shape(int batch, int keys, int heads, int ctas) {
  const size_t bytes = (size_t)batch * keys * heads * ROW;
  char *k, *v;
  CHECK(cudaMalloc(&k, bytes));
  CHECK(cudaMalloc(&v, bytes));
  fill<<<1320, 256>>>((uint32_t *)k, bytes / 4);
  fill<<<1320, 256>>>((uint32_t *)v, bytes / 4);
  const Cache c{k, v, batch, keys, heads};
  const auto p128 = CU_TENSOR_MAP_L2_PROMOTION_L2_128B, p256 = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  struct Variant {
    const char *name;
    std::function<void()> launch;
    std::vector<float> ms;
  };
  std::vector<Variant> variants = {
      {"cp.async", [=] { copies<ROW, NONE, 0, false>(c, false, ctas, 0); }, {}},
      {"a CTA for each head", [=] { copies<ROW, NONE, 0, false>(c, true, ctas, 0); }, {}},
      {"L2::128B", [=] { copies<ROW, L128, 0, false>(c, false, ctas, 0); }, {}},
      {"L2::256B", [=] { copies<ROW, L256, 0, false>(c, false, ctas, 0); }, {}},
      {"zeros past the last key", [=] { copies<ROW, ZEROS, 0, false>(c, false, ctas, 0); }, {}},
      {"the same, rows 16 bytes apart", [=] { copies<ROW, ZEROS, 16, false>(c, false, ctas, 0); }, {}},
      {"and ldmatrix of all", [=] { copies<ROW, ZEROS, 16, true>(c, false, ctas, 0); }, {}},
      {"and 500 clocks a step", [=] { copies<ROW, ZEROS, 16, true>(c, false, ctas, 500); }, {}},
      {"and 1,000 clocks", [=] { copies<ROW, ZEROS, 16, true>(c, false, ctas, 1000); }, {}},
      {"and 2,000 clocks", [=] { copies<ROW, ZEROS, 16, true>(c, false, ctas, 2000); }, {}},
      {"TMA, 128 bytes, promotion 256", [=] { boxes<ROW, 128>(c, false, ctas, p256); }, {}},
      {"TMA, 128 bytes, promotion 128", [=] { boxes<ROW, 128>(c, false, ctas, p128); }, {}},
      {"TMA, rows, promotion 256", [=] { boxes<ROW, ROW>(c, false, ctas, p256); }, {}},
  };
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  for (int round = 0; round < 5; round++)
    for (auto &x : variants) {
      x.launch();
      CHECK(cudaEventRecord(start));
      for (int i = 0; i < 3; i++) x.launch();
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, end));
      x.ms.push_back(ms / 3);
    }
  printf("rows of %d bytes, %d x %d x %d heads, %.0f MB\n", ROW, batch, keys, heads, 2 * bytes / 1e6);
  for (auto &x : variants) {
    std::sort(x.ms.begin(), x.ms.end());
    printf("  %-32s %8.1f us %7.3f TB/s\n", x.name, x.ms[2] * 1e3, 2 * bytes / x.ms[2] / 1e9);
  }
  CHECK(cudaFree(k));
  CHECK(cudaFree(v));
}

int main() {
  void *found;
  cudaDriverEntryPointQueryResult result;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
  encode = (Encode)found;
  shape<512>(16, 8192, 32, 132);
  shape<256>(16, 8192, 32, 132);
  shape<512>(128, 8192, 8, 132);
  shape<512>(1, 131072, 32, 128);
}
