// Convolution as an implicit matrix product on Tensor Cores: rows are output pixels, columns are output channels, and the inner
// dimension runs over the taps of the kernel and the input channels. implicit_gemm.py describes layout and budget.
//
// Follows elements.cuh, gemm_epilogue.cuh and tensor_cores.cuh. Macros: BM, BN, BK (tile), WARPS_M, WARPS_N (warps of a block), STAGES (tiles in flight). One dimension of blocks; the columns'
// tiles of the same rows are neighbours, so that the input is read from L2 for all but the first of them.

#define THREADS (WARPS_M * WARPS_N * 32)
#define PIECES (BK / 8) // pieces of 16 bytes in a row of a tile
#define ROWS_OF_A_PASS (THREADS / PIECES)
#define A_PASSES (BM / ROWS_OF_A_PASS)
#define B_PASSES (BN / ROWS_OF_A_PASS)
#define A_BYTES (BM * BK * 2)
#define STAGE_BYTES ((BM + BN) * BK * 2)
#define WARP_M (BM / WARPS_M)
#define WARP_N (BN / WARPS_N)
#define M_FRAGMENTS (WARP_M / 16)
#define N_FRAGMENTS (WARP_N / 8)

static_assert(BM % ROWS_OF_A_PASS == 0 && BN % ROWS_OF_A_PASS == 0 && ROWS_OF_A_PASS % 8 == 0, "whole passes over a tile");
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "whole fragments");
static_assert(BK == 32 || BK == 64, "the swizzle is for rows of 64 and 128 bytes");

// Place of a piece in its row: eight rows at the same piece are in different banks.
__device__ inline int swizzled(int row, int piece)
{
    return piece ^ (BK == 64 ? row & 7 : row >> 1 & 3);
}

// One bit for each tap of a row or column of the kernel that is inside of the input.
__device__ inline unsigned inside(int start, int taps, int size)
{
    const int first = start < 0 ? -start : 0;
    const int end = size - start < taps ? size - start : taps;
    return end > first ? (1u << end) - (1u << first) : 0u;
}

// Reads the tiles of a block one after the other: the taps in order, for each its channels.
struct Loader {
    const Element *x, *weights;
    int offsets[A_PASSES];   // of the pixel under the first tap
    unsigned taps[A_PASSES]; // bits 0-15: rows of the kernel that are inside of the input, 16-31: columns
    unsigned filters;        // bits of the passes with a filter
    int filter_step, filter_offset;
    int c, w, s, piece;
    int row, column, channel, tap;
    unsigned a_at, b_at;

    __device__ inline void load(unsigned stage)
    {
        const bool has_channels = channel + piece * 8 < c;
        const int move = (row * w + column) * c + channel;
#pragma unroll
        for (int i = 0; i < A_PASSES; ++i) {
            const bool is_read = has_channels && (taps[i] >> row & taps[i] >> (16 + column) & 1);
            copy_16_bytes(stage + a_at + i * ROWS_OF_A_PASS * BK * 2, x + (is_read ? offsets[i] + move : 0), is_read ? 16 : 0);
        }
        const Element *filter = weights + filter_offset + tap * c + channel;
#pragma unroll
        for (int i = 0; i < B_PASSES; ++i) {
            const bool is_read = has_channels && (filters >> i & 1);
            const Element *from = is_read ? filter + i * filter_step : weights;
            copy_16_bytes(stage + b_at + i * ROWS_OF_A_PASS * BK * 2, from, is_read ? 16 : 0);
        }
        channel += BK;
        if (channel >= c) {
            channel = 0;
            ++tap;
            if (++column == s) {
                column = 0;
                ++row;
            }
        }
    }
};

extern "C" __launch_bounds__(THREADS) __global__ void implicit_gemm(
    const Element *x, const Element *weights, const float *bias, const Element *residual, Element *y, float *partial, int *arrivals,
    int pixels, int h, int w, int c, int k, int out_h, int out_w, int r, int s, int stride, int pad, int splits)
{
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;
    const int n_tiles = (k + BN - 1) / BN, m_tiles = (pixels + BM - 1) / BM;
    const int tile = blockIdx.x % (n_tiles * m_tiles), split = blockIdx.x / (n_tiles * m_tiles);
    const int first_pixel = tile / n_tiles * BM, first_filter = tile % n_tiles * BN;
    const int steps_of_tap = (c + BK - 1) / BK, all_steps = r * s * steps_of_tap;
    const int first_step = all_steps * split / splits, steps = all_steps * (split + 1) / splits - first_step;
    const unsigned tiles = shared_address(dynamic_shared);

    Loader loader;
    loader.x = x, loader.weights = weights, loader.c = c, loader.w = w, loader.s = s;
    loader.piece = t % PIECES;
    loader.tap = first_step / steps_of_tap;
    loader.channel = first_step % steps_of_tap * BK;
    loader.row = loader.tap / s, loader.column = loader.tap % s;
    const int first_row = t / PIECES;
    loader.a_at = first_row * BK * 2 + swizzled(first_row, loader.piece) * 16;
    loader.b_at = A_BYTES + loader.a_at;
#pragma unroll
    for (int i = 0; i < A_PASSES; ++i) {
        const int pixel = first_pixel + first_row + i * ROWS_OF_A_PASS;
        const int line = pixel / out_w, image = line / out_h;
        const int top = (line - image * out_h) * stride - pad, left = (pixel - line * out_w) * stride - pad;
        loader.offsets[i] = ((image * h + top) * w + left) * c + loader.piece * 8;
        loader.taps[i] = pixel < pixels ? inside(top, r, h) | inside(left, s, w) << 16 : 0u;
    }
    loader.filters = 0;
#pragma unroll
    for (int i = 0; i < B_PASSES; ++i)
        loader.filters |= (unsigned)(first_filter + first_row + i * ROWS_OF_A_PASS < k) << i;
    loader.filter_offset = (first_filter + first_row) * r * s * c + loader.piece * 8;
    loader.filter_step = ROWS_OF_A_PASS * r * s * c;

    float sums[M_FRAGMENTS][N_FRAGMENTS][4];
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; ++i)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                sums[i][j][e] = 0;

#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < steps)
            loader.load(tiles + i * STAGE_BYTES);
        end_copies();
    }

    // Rows of the fragments in a tile; the piece within a row changes by an exclusive or.
    const int a_row = warp_row + (lane & 15), b_row = warp_column + (lane & 7) + (lane >> 4 << 3);
    const unsigned a_fragments = a_row * BK * 2, b_fragments = A_BYTES + b_row * BK * 2;
    const unsigned a_piece = swizzled(a_row, lane >> 4) << 4, b_piece = swizzled(b_row, lane >> 3 & 1) << 4;
    int read_stage = 0, write_stage = STAGES - 1;
    unsigned a[2][M_FRAGMENTS][4], b[2][N_FRAGMENTS / 2][4];
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        const unsigned stage = tiles + read_stage * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < M_FRAGMENTS; ++i)
            load_matrices(a[0][i], stage + a_fragments + i * 16 * BK * 2 + a_piece);
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS / 2; ++j)
            load_matrices(b[0][j], stage + b_fragments + j * 16 * BK * 2 + b_piece);
        if (step + STAGES - 1 < steps)
            loader.load(tiles + write_stage * STAGE_BYTES);
        end_copies();
#pragma unroll
        for (int part = 0; part < BK / 16; ++part) {
            const int now = part & 1;
            if (part + 1 < BK / 16) {
                const unsigned next = (part + 1) << 5;
#pragma unroll
                for (int i = 0; i < M_FRAGMENTS; ++i)
                    load_matrices(a[now ^ 1][i], stage + a_fragments + i * 16 * BK * 2 + (a_piece ^ next));
#pragma unroll
                for (int j = 0; j < N_FRAGMENTS / 2; ++j)
                    load_matrices(b[now ^ 1][j], stage + b_fragments + j * 16 * BK * 2 + (b_piece ^ next));
            }
#pragma unroll
            for (int i = 0; i < M_FRAGMENTS; ++i)
#pragma unroll
                for (int j = 0; j < N_FRAGMENTS; ++j)
                    multiply_add(sums[i][j], a[now][i], b[now][j / 2][j % 2 * 2], b[now][j / 2][j % 2 * 2 + 1]);
        }
        read_stage = read_stage + 1 == STAGES ? 0 : read_stage + 1;
        write_stage = write_stage + 1 == STAGES ? 0 : write_stage + 1;
    }

    // The sums go through shared memory, so that a thread stores 16 bytes of one pixel.
    wait_for_copies<0>();
    __syncthreads();
    float *rows = (float *)dynamic_shared;
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; ++i)
#pragma unroll
        for (int j = 0; j < N_FRAGMENTS; ++j) {
            float *to = rows + (warp_row + i * 16 + lane / 4) * SUMS_ROW(BN) + warp_column + j * 8 + lane % 4 * 2;
            to[0] = sums[i][j][0], to[1] = sums[i][j][1];
            to[8 * SUMS_ROW(BN)] = sums[i][j][2], to[8 * SUMS_ROW(BN) + 1] = sums[i][j][3];
        }
    __syncthreads();

    const Tile output = {bias, residual, y, partial, arrivals, pixels, k, first_pixel, first_filter, tile, split, splits};
    store_tile<BM, BN, THREADS>(output, rows, (int *)dynamic_shared, t, BlockBarrier());
}
