// End of a tile of an implicit GEMM: float32 sums in shared memory become float16 outputs.
//
// Follows elements.cuh.

// Floats of a row of sums: the padding keeps the stores of fragments free of bank conflicts.
#define SUMS_ROW(COLUMNS) ((COLUMNS) + 8)

// Barrier of all threads of the block.
struct BlockBarrier {
    __device__ inline void wait() const { __syncthreads(); }
};

// Operands and place of a tile.
struct Tile {
    const float *bias;
    const Element *residual;
    Element *y;
    float *partial; // (splits, pixels, k)
    int *arrivals;  // one for each tile; 0 before and after a launch
    int pixels, k, first_pixel, first_filter, number, split, splits;
};

// Add the parts of a tile and store it. With several splits each block stores its part, and the last to arrive adds them in order.
// `sums` is TILE_ROWS x TILE_COLUMNS; `flag` is an int of
// shared memory, which may be the first of the sums. All GROUP threads call it, `t` is the number of the calling one.
template <int TILE_ROWS, int TILE_COLUMNS, int GROUP, class Barrier>
__device__ inline void store_tile(const Tile &tile, const float *sums, int *flag, int t, const Barrier &barrier)
{
    const int k = tile.k, column = t % (TILE_COLUMNS / 8) * 8, filter = tile.first_filter + column;
    const long long part_size = (long long)tile.pixels * k;
    if (tile.splits > 1) {
#pragma unroll 4
        for (int row = t / (TILE_COLUMNS / 8); row < TILE_ROWS; row += GROUP / (TILE_COLUMNS / 8)) {
            const int pixel = tile.first_pixel + row;
            if (pixel >= tile.pixels || filter >= k)
                continue;
            float values[8];
            load_floats(sums + row * SUMS_ROW(TILE_COLUMNS) + column, values);
            store_floats(tile.partial + tile.split * part_size + (long long)pixel * k + filter, values);
        }
        __threadfence();
        barrier.wait();
        if (t == 0)
            *flag = atomicAdd(tile.arrivals + tile.number, 1);
        barrier.wait();
        if (*flag + 1 < tile.splits)
            return;
        __threadfence();
        if (t == 0)
            tile.arrivals[tile.number] = 0; // for the next launch
    }
#pragma unroll 4
    for (int row = t / (TILE_COLUMNS / 8); row < TILE_ROWS; row += GROUP / (TILE_COLUMNS / 8)) {
        const int pixel = tile.first_pixel + row;
        if (pixel >= tile.pixels || filter >= k)
            continue;
        const long long at = (long long)pixel * k + filter;
        float values[8];
        if (tile.splits > 1) {
            load_floats(tile.partial + at, values);
            for (int part = 1; part < tile.splits; ++part) {
                float more[8];
                load_floats(tile.partial + part * part_size + at, more);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    values[i] += more[i];
            }
        } else
            load_floats(sums + row * SUMS_ROW(TILE_COLUMNS) + column, values);
        store_finished(values, filter, at, tile.bias, tile.residual, tile.y);
    }
}
