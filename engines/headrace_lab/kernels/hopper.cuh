// Instructions of compute capability 9.0 as functions: barriers of shared memory, the copy engine and `wgmma` (PTX ISA, "mbarrier",
// "cp.async.bulk.tensor" and "wgmma.mma_async"). Needs the target sm_90a.

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

__device__ inline unsigned shared_address(const void *memory)
{
    return (unsigned)__cvta_generic_to_shared(memory);
}

__device__ inline void initialise_barrier(unsigned barrier, unsigned arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Make initialised barriers visible to the copy engine.
__device__ inline void publish_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void arrive(unsigned barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive and expect that many bytes of copies in this phase.
__device__ inline void arrive_and_expect(unsigned barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Wait until the phase of this parity is complete.
__device__ inline void wait(unsigned barrier, unsigned parity)
{
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ inline void prefetch_map(const TensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copy a box of consecutive output pixels under one tap, im2col mode; row and column are those of the first pixel's first tap.
__device__ inline void copy_pixels(
    unsigned to, const TensorMap *map, unsigned barrier, int channel, int column, int row, int image, int tap_column, int tap_row)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to), "l"(map), "r"(barrier), "r"(channel), "r"(column),
                 "r"(row), "r"(image), "h"((unsigned short)tap_column), "h"((unsigned short)tap_row)
                 : "memory");
}

// Copy a box of a tensor of two dimensions.
__device__ inline void copy_box(unsigned to, const TensorMap *map, unsigned barrier, int column, int row)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                     to), "l"(map), "r"(barrier), "r"(column), "r"(row)
                 : "memory");
}

// Copy a box of a tensor of three dimensions.
__device__ inline void copy_box(unsigned to, const TensorMap *map, unsigned barrier, int column, int row, int plane)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(plane)
                 : "memory");
}

// Copy a box to a tensor of two dimensions; what lies outside of it is left out.
__device__ inline void store_box(unsigned from, const TensorMap *map, int column, int row)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%1, {%2, %3}], [%0];" ::"r"(from), "l"(map), "r"(column),
                 "r"(row)
                 : "memory");
}

// Wait until the copy engine has read what this thread stores from shared memory.
__device__ inline void wait_for_stores()
{
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Make this thread's writes to shared memory visible to the copy engine, behind the next barrier.
__device__ inline void publish_writes()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline unsigned load_shared(unsigned address)
{
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ inline void store_shared(unsigned address, unsigned value)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Barrier of some warps of a block.
template <int THREADS> struct NamedBarrier {
    int number;
    __device__ inline void wait() const { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory"); }
};

// Number of the calling block in its cluster, of a cluster in one dimension.
__device__ inline unsigned cluster_rank()
{
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Barrier of all threads of a cluster; what they wrote to shared memory before is visible to all behind it.
__device__ inline void wait_for_cluster()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Load 16 bytes of the shared memory of another block of the cluster, from the address that they have in the calling one.
__device__ inline float4 load_of_block(unsigned address, unsigned rank)
{
    float4 value;
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address), "r"(rank)
                 : "memory");
    return value;
}

// Descriptor of a matrix in shared memory with rows of 128 bytes, swizzled by 128 bytes: eight rows are 1024 bytes apart.
__device__ inline unsigned long long describe(unsigned address)
{
    return (unsigned long long)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ inline void start_products()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void end_products()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ inline void wait_for_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers of the sums of 64, 128 and 256 columns, in the text of an instruction.
#define REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64 \
    REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_128 \
    REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// 8, 32, 64 and 128 sums from number `i` on, as operands.
#define SUMS_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_32(d, i) SUMS_8(d, i), SUMS_8(d, i + 8), SUMS_8(d, i + 16), SUMS_8(d, i + 24)
#define SUMS_64(d, i) SUMS_32(d, i), SUMS_32(d, i + 32)
#define SUMS_128(d, i) SUMS_64(d, i), SUMS_64(d, i + 64)

// sums (64x64) += a (64x16) * b (16x64).
__device__ inline void multiply_add(float (&d)[32], unsigned long long a, unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" REGISTERS_32 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : SUMS_32(d, 0)
                 : "l"(a), "l"(b));
}

// sums (64x128) += a (64x16) * b (16x128).
__device__ inline void multiply_add(float (&d)[64], unsigned long long a, unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" REGISTERS_64 "}, %64, %65, 1, 1, 1, 0, 0;"
                 : SUMS_64(d, 0)
                 : "l"(a), "l"(b));
}

// sums (64x256) += a (64x16) * b (16x256).
__device__ inline void multiply_add(float (&d)[128], unsigned long long a, unsigned long long b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" REGISTERS_128 "}, %128, %129, 1, 1, 1, 0, 0;"
                 : SUMS_128(d, 0)
                 : "l"(a), "l"(b));
}
