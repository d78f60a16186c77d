// Gathers rows from any addresses that a GPU can read into one contiguous batch. Padding rows are copies of the last one, since the
// model accepts that one.
//
// Any number of blocks in one dimension. A thread copies pieces of 16 bytes, four at a time: reads over the bus have a long latency,
// so only many reads in flight saturate it.

#define PIECE 16
#define UNROLL 4

typedef unsigned long long Address;

__device__ inline uint4 fetched(Address from, unsigned int size)
{
    uint4 value;
    if (size == PIECE && from % 16 == 0)
        return *(const uint4 *)from;
    if (size == PIECE && from % 4 == 0) {
        const unsigned int *words = (const unsigned int *)from;
        value.x = words[0];
        value.y = words[1];
        value.z = words[2];
        value.w = words[3];
        return value;
    }
    unsigned int words[4] = {0, 0, 0, 0};
#pragma unroll
    for (unsigned int i = 0; i < PIECE; ++i)
        if (i < size)
            words[i / 4] |= (unsigned int)((const unsigned char *)from)[i] << (i % 4 * 8);
    value.x = words[0];
    value.y = words[1];
    value.z = words[2];
    value.w = words[3];
    return value;
}

__device__ inline void put(Address to, uint4 value, unsigned int size)
{
    if (size == PIECE && to % 16 == 0) {
        *(uint4 *)to = value;
        return;
    }
    const unsigned int words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (unsigned int i = 0; i < PIECE; ++i)
        if (i < size)
            ((unsigned char *)to)[i] = (unsigned char)(words[i / 4] >> (i % 4 * 8));
}

extern "C" __launch_bounds__(512) __global__ void gather(
    const Address *addresses, unsigned char *destination, unsigned long long row_bytes, int rows, int total)
{
    const unsigned long long pieces = (row_bytes + PIECE - 1) / PIECE;
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    const unsigned long long step_rows = step / pieces, step_pieces = step % pieces;
    const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long row = first / pieces, piece = first % pieces;
    while (row < total) {
        uint4 values[UNROLL];
        Address targets[UNROLL];
        unsigned int sizes[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            sizes[k] = 0;
            if (row < total) {
                const unsigned long long start = piece * PIECE;
                sizes[k] = row_bytes - start < PIECE ? (unsigned int)(row_bytes - start) : PIECE;
                values[k] = fetched(addresses[row < rows ? row : rows - 1] + start, sizes[k]);
                targets[k] = (Address)(destination + row * row_bytes + start);
                row += step_rows;
                piece += step_pieces;
                if (piece >= pieces) {
                    piece -= pieces;
                    ++row;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (sizes[k])
                put(targets[k], values[k], sizes[k]);
    }
}
