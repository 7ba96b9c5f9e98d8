// Attention over a prefix forest on SM90: one persistent CTA per SM, fed from lists that the host planned.
//
//   warp 0            streams K and V tiles of 128 tokens through a ring that runs across items (TMA)
//   warps 1, 2        load the queries, the row limits and the output rows of the next item of warpgroup 1, 2
//   warpgroups 1, 2   64 packed query rows each: S = Q K^T, online softmax, O += P V (wgmma)
//
// A tile belongs to both warpgroups (more than 64 query rows read it) or to one of them; then the producer arrives at
// the tile's "empty" barrier in the other's place. Each warpgroup has its own "full" barriers, and there is a third set
// for shared tiles: so a warpgroup sees every phase of the barriers that it waits on, and never runs ahead of one.
// A CTA has three lists of tiles, those of each warpgroup and the shared ones. The warpgroups' own lists are dealt out
// in turn, and half of the CTAs begin with them: what streams from memory runs beside what multiplies.
//
// Compile-time constants: HEAD_DIM, GROUP (query heads of a KV head), PAGE_SIZE, BOX (tokens of one copy), DTYPE.
#include "ptx.cuh"
#include "wgmma.cuh"

constexpr int TILE = 128;                       // tokens
constexpr int PANELS = HEAD_DIM / 64;           // a tile is stored as panels of 64 columns, 128 bytes a row
constexpr int PANEL_BYTES = TILE * 128;
constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
constexpr int STAGES = 6 / PANELS;              // of the ring, for K and for V
constexpr int Q_PANEL_BYTES = 64 * 128;
constexpr int Q_BYTES = PANELS * Q_PANEL_BYTES;
constexpr int TOKENS = 64 / GROUP;              // query tokens of a warpgroup
constexpr int Q_COPY_BYTES = PANELS * TOKENS * GROUP * 128;
constexpr int BOXES = TILE / BOX;
constexpr int NO_LIMIT = 0x3fffffff;

enum Set { FIRST = 0, SECOND = 1, BOTH = 2 };   // whose tile it is

// Records as the host writes them; hopper_schedule.py has the same fields.
struct alignas(16) Segment {  // consecutive tiles of one node
    int pages;                // offset of the node's pages in the page list
    int slot;                 // KV slot of the first tile's first row, a multiple of BOX
    int begin, end;           // valid slots
    int head;                 // KV head; SEGMENT_ONCE: nobody else reads these tiles
    int tiles;
    int old;                  // of these, written before this step: may be read before the kernel in front has ended
    int position;             // absolute position of `slot`
};
constexpr int SEGMENT_ONCE = 1 << 16;

struct alignas(16) Item {  // what one warpgroup does with some tiles
    int tile;              // number of the first tile among the CTA's
    int tiles;
    int token, tokens;     // query tokens
    int head;              // KV head
    int flags;             // ITEM_*
    int part;              // first row among the partial results
    int paired;            // after so many of its tiles comes one of the other warpgroup's
};
constexpr int ITEM_SHARED = 1, ITEM_DIRECT = 2, ITEM_CAUSAL = 4;

struct alignas(16) Lists {         // of one CTA
    int segments[3][2];            // [Set]: [begin, end)
    int items[2][2];               // [warpgroup]: [begin, end)
    int split_first;               // whether the warpgroups' own tiles come before the shared ones
    int spare[5];
    Segment first[3];              // a copy of each list's first segment, and the pages of its first tile's boxes:
    int pages[3][8];               // one miss instead of three
};

struct Arguments {
    const Lists* lists;
    const Segment* segments;
    const Item* items;
    const int* pages;
    const int* token_end;   // [tokens] positions that a query token attends to: [0, token_end)
    unsigned short* out;    // [tokens, heads, HEAD_DIM]
    float* lse;             // [tokens, heads] or null
    unsigned short* partial_out;  // [rows, HEAD_DIM], fp16
    float* partial_lse;     // [rows], natural logarithm
    const float* scale_at;  // in place of `scale`, or null
    int heads;
    float scale;            // of the scores
};

struct alignas(1024) Shared {
    unsigned char k[STAGES][TILE_BYTES];
    unsigned char v[STAGES][TILE_BYTES];
    unsigned char q[2][Q_BYTES];
    int4 tile[STAGES];      // first and last valid row, position of row 0
    Item item[2][2];        // [warpgroup][parity of the item's number]
    int first_end[2][2];    // smallest token_end of an item
    int row_end[2][2][64];  // token_end of each query row
    int row_to[2][2][64];   // row of the output or of the partial results, -1 for padding
    u64 k_full[3][STAGES], v_full[3][STAGES];  // [Set]
    u64 k_empty[STAGES], v_empty[STAGES];
    u64 q_full[2], q_empty[2];
};

static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a CTA can have");

__device__ __forceinline__ void advance(int& stage, u32& phase) {
    if (++stage == STAGES) stage = 0, phase ^= 1;
}

// ---- warp 0 ----
struct Cursor {  // in one of the CTA's lists of tiles
    Segment now, next;
    int index, end, tile;
    int page;  // of this lane's box of the tile
};

struct Ring {
    const Arguments& a;
    const TensorMap *k_map, *v_map;
    Shared& s;
    int stage = 0;
    u32 phase = 1;
    bool waited = false;

    __device__ __forceinline__ Cursor begin(const Lists& lists, int set, int box) const {
        Cursor c;
        c.index = lists.segments[set][0], c.end = lists.segments[set][1], c.tile = 0;
        if (c.index < c.end) {
            c.now = lists.first[set];
            c.page = box < BOXES ? lists.pages[set][box] : 0;
            c.next = a.segments[min(c.index + 1, c.end - 1)];
        }
        return c;
    }

    __device__ __forceinline__ void put(Cursor& c, int set) {  // streams one tile
        const int lane = threadIdx.x & 31, panel = lane % PANELS, box = lane / PANELS;
        const u32 to = panel * PANEL_BYTES + box * BOX * 128;
        const u64 policy = c.now.head & SEGMENT_ONCE ? 0x12F0000000000000ull : 0x14F0000000000000ull;  // evict first, last
        const int head = c.now.head & (SEGMENT_ONCE - 1);
        const int base = c.now.slot + c.tile * TILE, slot = base + box * BOX, page = c.page;
        const bool mine = box < BOXES && slot < c.now.end, last = c.tile + 1 == c.now.tiles;
        const int valid = min(TILE, c.now.end - base), begin = max(0, c.now.begin - base);
        const int position = c.now.position + c.tile * TILE;
        const u32 bytes = (valid + BOX - 1) / BOX * BOX * PANELS * 128;
        if (!waited && c.tile >= c.now.old) {
            wait_for_previous_kernel();
            waited = true;
        }
        ++c.tile;
        if (last) {
            c.now = c.next, c.tile = 0, ++c.index;
            c.next = a.segments[min(c.index + 1, c.end - 1)];
        }
        const int later = c.now.slot + c.tile * TILE + box * BOX;
        if (box < BOXES && c.index < c.end && later < c.now.end) c.page = a.pages[c.now.pages + later / PAGE_SIZE];

        wait(shared_address(&s.k_empty[stage]), phase);
        const u32 k_full = shared_address(&s.k_full[set][stage]), v_full = shared_address(&s.v_full[set][stage]);
        if (lane == 0) {
            s.tile[stage] = make_int4(begin, valid, position, 0);
            arrive_expect(k_full, bytes);
            if (set != BOTH) arrive(shared_address(&s.k_empty[stage]), 4);
        }
        if (mine) load_box(shared_address(s.k[stage]) + to, k_map, k_full, panel * 64, head, slot % PAGE_SIZE, page, policy);
        wait(shared_address(&s.v_empty[stage]), phase);
        if (lane == 0) {
            arrive_expect(v_full, bytes);
            if (set != BOTH) arrive(shared_address(&s.v_empty[stage]), 4);
        }
        if (mine) load_box(shared_address(s.v[stage]) + to, v_map, v_full, panel * 64, head, slot % PAGE_SIZE, page, policy);
        __syncwarp();  // no lane may fall a whole phase behind the others
        advance(stage, phase);
    }
};

__device__ __forceinline__ void stream_tiles(const Arguments& a, const TensorMap* k_map, const TensorMap* v_map, Shared& s) {
    const int box = (threadIdx.x & 31) / PANELS;
    const Lists& lists = a.lists[blockIdx.x];
    const int split_first = lists.split_first;
    Ring ring = {a, k_map, v_map, s};
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
        if (part == split_first) {
            Cursor both = ring.begin(lists, BOTH, box);
            while (both.index < both.end) ring.put(both, BOTH);
        } else {
            Cursor first = ring.begin(lists, FIRST, box), second = ring.begin(lists, SECOND, box);
            while (first.index < first.end || second.index < second.end) {
                if (first.index < first.end) ring.put(first, FIRST);
                if (second.index < second.end) ring.put(second, SECOND);
            }
        }
    }
}

// ---- warps 1 and 2 ----
__device__ __forceinline__ void load_queries(const Arguments& a, const TensorMap* q_map, Shared& s, int group) {
    const int lane = threadIdx.x & 31;
    const Lists& lists = a.lists[blockIdx.x];
    const int begin = lists.items[group][0], end = lists.items[group][1];
    if (begin == end) return;
    Item next = a.items[begin];
    wait_for_previous_kernel();
    const u32 full = shared_address(&s.q_full[group]);
    for (int index = begin, number = 0; index < end; ++index, ++number) {
        const Item item = next;
        next = a.items[min(index + 1, end - 1)];
        const int parity = number & 1;
        int to[2], last[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane + 32 * i, token = item.token + row / GROUP;
            const bool used = row < item.tokens * GROUP;
            last[i] = used && (item.flags & ITEM_CAUSAL) ? a.token_end[token] : NO_LIMIT;
            const int direct = token * a.heads + item.head * GROUP + row % GROUP;
            to[i] = !used ? -1 : item.flags & ITEM_DIRECT ? direct : item.part + row;
        }
        wait(shared_address(&s.q_empty[group]), parity ^ 1);
        if (lane < PANELS)
            load_box(shared_address(s.q[group]) + lane * Q_PANEL_BYTES, q_map, full, lane * 64, item.head * GROUP, item.token);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            s.row_end[group][parity][lane + 32 * i] = last[i];
            s.row_to[group][parity][lane + 32 * i] = to[i];
        }
        const int first = __reduce_min_sync(~0u, min(last[0], last[1]));
        if (lane == 0) {
            s.item[group][parity] = item;
            s.first_end[group][parity] = first;
        }
        __syncwarp();
        if (lane == 0) arrive_expect(full, Q_COPY_BYTES);
    }
}

// ---- warpgroups 1 and 2 ----
struct Rows {           // the two rows of a thread: its softmax so far
    float maximum[2];   // of the scores, before scaling
    float sum[2];       // this thread's part
};

// Scores of one tile become probabilities; returns what the accumulator must be multiplied with.
__device__ __forceinline__ float2 softmax(float (&scores)[64], Rows& rows, float scale) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float m = rows.maximum[r];
#pragma unroll
        for (int i = 0; i < 64; i += 4) m = fmaxf(m, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        const float shift = m == -INF ? 0.f : m * scale;
        factor[r] = exp2_fast(rows.maximum[r] * scale - shift);
        rows.maximum[r] = m;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            const float x = exp2_fast(scores[i + 2 * r] * scale - shift), y = exp2_fast(scores[i + 2 * r + 1] * scale - shift);
            scores[i + 2 * r] = x, scores[i + 2 * r + 1] = y;
            sum += x + y;
        }
        rows.sum[r] = rows.sum[r] * factor[r] + sum;
    }
    return make_float2(factor[0], factor[1]);
}

__device__ __forceinline__ void mask(float (&scores)[64], int column, int begin, int end0, int end1) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int at = i / 4 * 8 + (i & 1) + column;
        if (at < begin || at >= (i & 2 ? end1 : end0)) scores[i] = -INF;
    }
}

// Rows that hold no valid token may hold NaN, and 0 x NaN is NaN.
__device__ __forceinline__ void clear_rows(unsigned char* v, int begin, int end, int thread) {
#pragma unroll 1
    for (int row = thread >> 3; row < TILE; row += 16)
        if (row < begin || row >= end)
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                *reinterpret_cast<int4*>(v + panel * PANEL_BYTES + row * 128 + (thread & 7) * 16) = make_int4(0, 0, 0, 0);
    fence_async_proxy();
}

__device__ __forceinline__ void start_scores(float (&scores)[64], u32 q, u32 k) {
    const u64 qd = matrix_descriptor(q, 16), kd = matrix_descriptor(k, 16);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        const int panel = i / 4, step = i % 4 * 2;  // 16 columns are 32 bytes, two units of a descriptor
        mma_scores(scores, qd + ((panel * Q_PANEL_BYTES) >> 4) + step, kd + ((panel * PANEL_BYTES) >> 4) + step, i != 0);
    }
}

__device__ __forceinline__ void start_values(float (&o)[HEAD_DIM / 2], const u32 (&p)[32], u32 v, bool accumulate) {
    const u64 vd = matrix_descriptor(v, PANEL_BYTES);
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i)
        mma_values(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], vd + ((i * 16 * 128) >> 4), i != 0 || accumulate);
}

// Normalises one of the thread's two rows and writes it.
__device__ __forceinline__ void finish_row(const Arguments& a, const float (&o)[HEAD_DIM / 2], float scale, float maximum, float sum,
                                           int r, int to, bool direct) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (to < 0) return;
    const int quad = threadIdx.x & 3;
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    const float lse = sum > 0.f ? (maximum * scale + log2_fast(sum)) * 0.69314718056f : -INF;
    u32* row = reinterpret_cast<u32*>((direct ? a.out : a.partial_out) + static_cast<long long>(to) * HEAD_DIM) + quad;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) {
        const float x = o[4 * i + 2 * r] * inverse, y = o[4 * i + 2 * r + 1] * inverse;
        row[4 * i] = direct ? pack(x, y) : pack_half(x, y);
    }
    if (quad == 0) {
        if (!direct) a.partial_lse[to] = lse;
        else if (a.lse) a.lse[to] = lse;
    }
}

__device__ __forceinline__ void attend(const Arguments& a, Shared& s, int group) {
    const int thread = threadIdx.x & 127, lane = thread & 31, row = thread / 32 * 16 + lane / 4, column = 2 * (lane & 3);
    const Lists& lists = a.lists[blockIdx.x];
    const int items = lists.items[group][1] - lists.items[group][0];
    const float scale = (a.scale_at ? *a.scale_at : a.scale) * 1.44269504089f;
    u32 k_phases = 0, v_phases = 0;  // a bit for each stage and set: [own stages][shared stages]
    float scores[64], o[HEAD_DIM / 2];
    u32 p[32];

    for (int number = 0; number < items; ++number) {
        const int parity = number & 1;
        wait(shared_address(&s.q_full[group]), parity);
        const Item item = s.item[group][parity];
        const int first_end = s.first_end[group][parity];
        const int end0 = s.row_end[group][parity][row], end1 = s.row_end[group][parity][row + 8];
        const int set = item.flags & ITEM_SHARED ? BOTH : group;
        const int bits = item.flags & ITEM_SHARED ? 16 : 0;
        int stage = item.tile % STAGES, begin, end;
        Rows rows = {{-INF, -INF}, {0.f, 0.f}};

        auto next_scores = [&](int at) {
            wait(shared_address(&s.k_full[set][at]), (k_phases >> (bits + at)) & 1);
            k_phases ^= 1u << (bits + at);
            pin(scores);
            mma_begin();
            start_scores(scores, shared_address(s.q[group]), shared_address(s.k[at]));
            mma_commit();
        };
        auto next_values = [&](int at, bool accumulate) {
            wait(shared_address(&s.v_full[set][at]), (v_phases >> (bits + at)) & 1);
            v_phases ^= 1u << (bits + at);
            if (begin > 0 || end < TILE) {
                clear_rows(s.v[at], begin, end, thread);
                warpgroup_sync(1 + group);
            }
            pin(o);
            mma_begin();
            start_values(o, p, shared_address(s.v[at]), accumulate);
            mma_commit();
        };
        auto scores_done = [&](int at, bool last) {  // after the wait for the product: frees K, and Q after its last use
            const int4 tile = s.tile[at];
            __syncwarp();
            if (lane == 0) {
                arrive(shared_address(&s.k_empty[at]));
                if (last) arrive(shared_address(&s.q_empty[group]));
            }
            begin = tile.x, end = tile.y;
            if (begin > 0 || end < TILE || tile.z + TILE > first_end)
                mask(scores, column, begin, min(end, end0 - tile.z), min(end, end1 - tile.z));
        };
        auto values_done = [&](int at) {
            if (lane == 0) arrive(shared_address(&s.v_empty[at]));
        };

        next_scores(stage);
        mma_wait<0>();
        pin(scores);
        scores_done(stage, item.tiles == 1);
        softmax(scores, rows, scale);
#pragma unroll
        for (int i = 0; i < 32; ++i) p[i] = pack(scores[2 * i], scores[2 * i + 1]);

        for (int tile = 1; tile < item.tiles; ++tile) {
            const int before = stage;
            stage += tile <= item.paired ? 2 : 1;
            if (stage >= STAGES) stage -= STAGES;
            next_scores(stage);
            next_values(before, tile > 1);
            mma_wait<1>();
            pin(scores);
            scores_done(stage, tile + 1 == item.tiles);
            const float2 factor = softmax(scores, rows, scale);
            mma_wait<0>();
            pin(o);
            values_done(before);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= i & 2 ? factor.y : factor.x;
#pragma unroll
            for (int i = 0; i < 32; ++i) p[i] = pack(scores[2 * i], scores[2 * i + 1]);
        }
        next_values(stage, item.tiles > 1);
        const int to0 = s.row_to[group][parity][row], to1 = s.row_to[group][parity][row + 8];
        mma_wait<0>();
        pin(o);
        values_done(stage);
        finish_row(a, o, scale, rows.maximum[0], rows.sum[0], 0, to0, item.flags & ITEM_DIRECT);
        finish_row(a, o, scale, rows.maximum[1], rows.sum[1], 1, to1, item.flags & ITEM_DIRECT);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
forest_attention(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                 const __grid_constant__ TensorMap v_map, const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        prefetch_map(&k_map);
        prefetch_map(&v_map);
        prefetch_map(&q_map);
        for (int i = 0; i < STAGES; ++i) {
            for (int set = 0; set < 3; ++set) {
                barrier_init(shared_address(&s.k_full[set][i]), 1);
                barrier_init(shared_address(&s.v_full[set][i]), 1);
            }
            barrier_init(shared_address(&s.k_empty[i]), 8);  // one arrival for each of the consumers' warps
            barrier_init(shared_address(&s.v_empty[i]), 8);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&s.q_full[i]), 1);
            barrier_init(shared_address(&s.q_empty[i]), 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    let_next_kernel_start();
    if (threadIdx.x < 128) {
        fewer_registers<88>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) stream_tiles(a, &k_map, &v_map, s);
        else if (warp < 3) load_queries(a, &q_map, s, warp - 1);
    } else {
        more_registers<208>();
        attend(a, s, threadIdx.x / 128 - 1);
    }
}
