// Compares two results of a convolution, element by element: counts those that are not finite or differ by more than a limit.
//
// Any number of blocks of 256 threads; each block stores its count and its largest difference. HALF: 1 for FP16 elements.

#define THREADS 256

#if HALF
typedef unsigned short Element;
__device__ inline float value_of(Element element) { return from_half(element); }
#else
typedef float Element;
__device__ inline float value_of(Element element) { return element; }
#endif

extern "C" __launch_bounds__(THREADS) __global__ void compare(
    const Element *result, const Element *reference, unsigned long long count, int limit_bits, int *wrong, float *largest)
{
    __shared__ int counts[THREADS];
    __shared__ float differences[THREADS];
    const float limit = __int_as_float(limit_bits);
    int mine = 0;
    float difference = 0.0f;
    for (unsigned long long i = (unsigned long long)blockIdx.x * THREADS + threadIdx.x; i < count;
         i += (unsigned long long)gridDim.x * THREADS) {
        const float distance = fabsf(value_of(result[i]) - value_of(reference[i]));
        // A comparison with NaN is false.
        if (distance <= limit)
            difference = distance > difference ? distance : difference;
        else
            ++mine;
    }
    counts[threadIdx.x] = mine;
    differences[threadIdx.x] = difference;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS; ++i) {
            mine += counts[i];
            difference = differences[i] > difference ? differences[i] : difference;
        }
        wrong[blockIdx.x] = mine;
        largest[blockIdx.x] = difference;
    }
}
