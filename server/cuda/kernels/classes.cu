// Scores to probabilities and to the best classes.
//
// Defined by the compiler's options: HALF (1: FP16 scores), THREADS (of a block, a power of two).
//
// One block a row. Of equal scores the lower class comes first, as in the reference: both sort by one whole number made of the score
// and the class.

#if HALF
typedef unsigned short Score;
__device__ inline float loaded(Score score) { return from_half(score); }
#else
typedef float Score;
__device__ inline float loaded(Score score) { return score; }
#endif

typedef unsigned long long Key;

__device__ inline Key key_of(float score, int number)
{
    const int bits = __float_as_int(score + 0.0f); // -0 becomes 0, which it equals
    const unsigned int ascending = bits < 0 ? ~(unsigned int)bits : (unsigned int)bits | 0x80000000u;
    return (Key)ascending << 32 | (0xFFFFFFFFu - (unsigned int)number);
}

// The largest of the block's keys, for all threads.
__device__ inline Key block_largest(Key mine, Key *shared)
{
    shared[threadIdx.x] = mine;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half && shared[threadIdx.x + half] > shared[threadIdx.x])
            shared[threadIdx.x] = shared[threadIdx.x + half];
    }
    __syncthreads();
    const Key largest = shared[0];
    __syncthreads(); // before the memory is used again
    return largest;
}

__device__ inline float block_sum(float mine, float *shared)
{
    shared[threadIdx.x] = mine;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
    const float sum = shared[0];
    __syncthreads();
    return sum;
}

__device__ inline float block_highest(float mine, float *shared)
{
    shared[threadIdx.x] = mine;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    const float highest = shared[0];
    __syncthreads();
    return highest;
}

// The highest score of a row, and the sum of exp(score - highest).
__device__ inline float exponentials(const Score *scores, int classes, float *shared, float *highest)
{
    float mine = __int_as_float(0xff800000); // minus infinity
    for (int i = threadIdx.x; i < classes; i += THREADS)
        mine = fmaxf(mine, loaded(scores[i]));
    *highest = block_highest(mine, shared);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < classes; i += THREADS)
        sum += expf(loaded(scores[i]) - *highest);
    return block_sum(sum, shared);
}

extern "C" __global__ void soften(const Score *scores, float *shares, int classes)
{
    __shared__ float floats[THREADS];
    scores += (unsigned long long)blockIdx.x * classes;
    shares += (unsigned long long)blockIdx.x * classes;
    float highest;
    const float sum = exponentials(scores, classes, floats, &highest);
    for (int i = threadIdx.x; i < classes; i += THREADS)
        shares[i] = expf(loaded(scores[i]) - highest) / sum;
}

extern "C" __global__ void rank(const Score *scores, float *best, int *numbers, int classes, int top_k, int softmax)
{
    __shared__ float floats[THREADS];
    __shared__ Key keys[THREADS];
    scores += (unsigned long long)blockIdx.x * classes;
    best += (unsigned long long)blockIdx.x * top_k;
    numbers += (unsigned long long)blockIdx.x * top_k;
    float highest = 0.0f, sum = 1.0f;
    if (softmax)
        sum = exponentials(scores, classes, floats, &highest);
    Key before = 0xFFFFFFFFFFFFFFFFull;
    for (int place = 0; place < top_k; ++place) {
        Key mine = 0;
        for (int i = threadIdx.x; i < classes; i += THREADS) {
            const Key key = key_of(loaded(scores[i]), i);
            if (key < before && key > mine)
                mine = key;
        }
        before = block_largest(mine, keys);
        if (threadIdx.x == 0) {
            const int number = (int)(0xFFFFFFFFu - (unsigned int)before);
            const float score = loaded(scores[number]);
            numbers[place] = number;
            best[place] = softmax ? expf(score - highest) / sum : score;
        }
    }
}
