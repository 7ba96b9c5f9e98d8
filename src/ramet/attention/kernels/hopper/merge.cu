// Merges the partial results of each (token, head) by their log-sum-exp. WAYS groups of lanes share one row's partials.
#include "ptx.cuh"

constexpr int LANES = HEAD_DIM / 8;  // of one group: 8 columns a lane
constexpr int GROUPS = 256 / LANES;
constexpr int AT_ONCE = 4;

struct Arguments {
    const int* begin;    // [tokens x HEADS_PLANNED + 1] where the list of a (token, planned head)'s partial results begins
    const int* entries;  // their first rows; a token without entries is written already
    const unsigned short* partial_out;  // [rows, HEAD_DIM], fp16
    const float* partial_lse;           // [rows], natural logarithm
    unsigned short* out;
    float* lse;
    int heads;
    int rows;    // tokens x heads
    int stride;  // rows of partial results from one run of HEADS_PLANNED KV heads to the next
};

struct State {
    float maximum = -INF, sum = 0.f, o[8] = {};

    __device__ __forceinline__ void add(float lse, const float (&x)[8], float weight) {
        if (lse == -INF) return;
        const float m = fmaxf(maximum, lse), keep = __expf(maximum - m), take = __expf(lse - m) * weight;
        maximum = m;
        sum = sum * keep + take;
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i] = o[i] * keep + x[i] * take;
    }
};

template <int WAYS>
__device__ __forceinline__ void merge(const Arguments& a) {
    __shared__ float states[WAYS > 1 ? GROUPS : 1][WAYS > 1 ? HEAD_DIM + 2 : 1];
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES, way = group % WAYS;
    const int row = blockIdx.x * (GROUPS / WAYS) + group / WAYS;
    const bool used = row < a.rows;
    const int token = used ? row / a.heads : 0, head = row - token * a.heads, kv_head = head / GROUP;
    const int list = token * HEADS_PLANNED + kv_head % HEADS_PLANNED;
    const int begin = used ? a.begin[list] : 0, end = used ? a.begin[list + 1] : 0;
    const int offset = kv_head / HEADS_PLANNED * a.stride + head % GROUP;
    int at[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) at[i] = begin + way + i * WAYS < end ? a.entries[begin + way + i * WAYS] : -1;
    wait_for_previous_kernel();
    let_next_kernel_start();
    State state;
    for (int part = begin + way; part < end; part += WAYS * AT_ONCE) {
        float lse[AT_ONCE];
        uint4 data[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            lse[i] = -INF;
            if (at[i] >= 0) {
                const long long from = at[i] + offset;
                lse[i] = a.partial_lse[from];
                data[i] = reinterpret_cast<const uint4*>(a.partial_out + from * HEAD_DIM)[lane];
            }
            const int later = part + (AT_ONCE + i) * WAYS;
            at[i] = later < end ? a.entries[later] : -1;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float2 x = unpack_half(data[i].x), y = unpack_half(data[i].y), z = unpack_half(data[i].z), w = unpack_half(data[i].w);
            const float values[8] = {x.x, x.y, y.x, y.y, z.x, z.y, w.x, w.y};
            state.add(lse[i], values, 1.f);
        }
    }
    if (WAYS > 1) {  // every thread of the block comes here
        float* mine = states[group];
        mine[HEAD_DIM] = state.maximum, mine[HEAD_DIM + 1] = state.sum;
#pragma unroll
        for (int i = 0; i < 8; ++i) mine[lane * 8 + i] = state.sum > 0.f ? state.o[i] / state.sum : 0.f;
        __syncthreads();
        if (way != 0) return;
        for (int other = 1; other < WAYS; ++other) {
            const float* theirs = states[group + other];
            float values[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = theirs[lane * 8 + i];
            state.add(theirs[HEAD_DIM], values, theirs[HEAD_DIM + 1]);
        }
    }
    if (begin == end) return;
    const float inverse = state.sum > 0.f ? 1.f / state.sum : 0.f;
    uint4 y;
    y.x = pack(state.o[0] * inverse, state.o[1] * inverse), y.y = pack(state.o[2] * inverse, state.o[3] * inverse);
    y.z = pack(state.o[4] * inverse, state.o[5] * inverse), y.w = pack(state.o[6] * inverse, state.o[7] * inverse);
    reinterpret_cast<uint4*>(a.out + static_cast<long long>(row) * HEAD_DIM)[lane] = y;
    if (a.lse && lane == 0) a.lse[row] = state.sum > 0.f ? state.maximum + __logf(state.sum) : -INF;
}

extern "C" __global__ void __launch_bounds__(256) merge_few(const __grid_constant__ Arguments a) { merge<1>(a); }
extern "C" __global__ void __launch_bounds__(256) merge_some(const __grid_constant__ Arguments a) { merge<4>(a); }
extern "C" __global__ void __launch_bounds__(256) merge_many(const __grid_constant__ Arguments a) { merge<GROUPS>(a); }
