// Converts activations between (n, h, w, c) and (n, c / BLOCK, h, w, BLOCK): BLOCK is 1 for NCHW, 32 for TensorRT's CHW32.
//
// Any number of blocks in one dimension; a thread converts one element at a time. SIZE: bytes of an element, 2 or 4.

#if SIZE == 2
typedef unsigned short Element;
#else
typedef unsigned int Element;
#endif

extern "C" __launch_bounds__(256) __global__ void change_layout(
    const Element *source, Element *target, unsigned long long count, int channels, int pixels, int to_channels_last)
{
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (unsigned long long)gridDim.x * blockDim.x) {
        const unsigned long long channel = i % channels, pixel = i / channels % pixels, image = i / channels / pixels;
        const unsigned long long group = image * (channels / BLOCK) + channel / BLOCK;
        const unsigned long long blocked = (group * pixels + pixel) * BLOCK + channel % BLOCK;
        if (to_channels_last)
            target[i] = source[blocked];
        else
            target[blocked] = source[i];
    }
}
