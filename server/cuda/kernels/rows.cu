// Rows that lie anywhere in the GPU's memory, one below the other; rows that are wanting are copies of the last one, which the model
// is known to take.
//
// One row of the grid (y) a row of the result; the threads along x share its bytes.

extern "C" __global__ void gather(
    const unsigned long long *addresses, unsigned char *destination, unsigned long long row_bytes, int rows)
{
    const int row = blockIdx.y < rows ? blockIdx.y : rows - 1;
    const unsigned long long from = addresses[row];
    const unsigned long long to = (unsigned long long)(destination + blockIdx.y * row_bytes);
    const unsigned long long start = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned long long step = gridDim.x * blockDim.x;
    if ((from | to | row_bytes) % 16 == 0) {
        for (unsigned long long i = start; i < row_bytes / 16; i += step)
            ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    } else {
        for (unsigned long long i = start; i < row_bytes; i += step)
            ((unsigned char *)to)[i] = ((const unsigned char *)from)[i];
    }
}
