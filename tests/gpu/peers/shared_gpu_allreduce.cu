// What one GPU allows: all-reduces of f32 between processes that share it, whose kernels signal one another
// in GPU memory.
//
//   nvcc -O3 -arch=native shared_gpu_allreduce.cu -o shared_gpu_allreduce
//   shared_gpu_allreduce RANKS     (2, 4 or 8; nvidia-cuda-mps-control must run. SHORT=1 leaves out two-shot)
//
// A reference to measure beside, not code to take over: one type and one operation. "one-shot" and "two-shot"
// check nothing, and assume that all CTAs are resident. "checked" is the one-shot with an owner word, tickets
// for slices, a hash of the call for each slice and an abort word. Prints JSON: first the bandwidth of a
// copy, then a line for each kernel, number of CTAs and length, in microseconds of the slowest rank: of 20
// calls in a graph, per call; enqueued back to back, per call; one call and a synchronisation.
#include <cuda_runtime.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <sys/mman.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#define CK(x)                                                                          \
    do {                                                                               \
        cudaError_t e_ = (x);                                                          \
        if (e_ != cudaSuccess) {                                                       \
            printf("rank %d line %d: %s\n", g_rank, __LINE__, cudaGetErrorString(e_)); \
            fflush(stdout);                                                            \
            _exit(3);                                                                  \
        }                                                                              \
    } while (0)
static int g_rank = -1;
constexpr int MAXP = 8, MAXB = 128;
constexpr size_t MAXN = size_t(256) << 20, LLMAX = size_t(128) << 10;  // bytes; LL: payload per source
constexpr size_t O_IN = 0, O_OUT = MAXN, O_LL = 2 * MAXN, O_FLAG = O_LL + 2 * MAXP * 2 * LLMAX,
                 O_EPOCH = O_FLAG + 2 * MAXB * MAXP * 8, O_ENTRY = O_EPOCH + 256,
                 TOTAL = O_ENTRY + 2 * MAXB * MAXP * 16 + 4096;
struct Peers {
    char* base[MAXP];
};
struct Shared {
    std::atomic<int> arrived[2];
    std::atomic<int> turn;
    cudaIpcMemHandle_t handle[MAXP];
    double t[MAXP];
    int bad[MAXP];
};
static Shared* sh;
static int P;
static void barrier() {
    static int turn = 0;
    int me = turn & 1;
    turn++;
    if (sh->arrived[me].fetch_add(1) == P - 1) {
        sh->arrived[me] = 0;
        sh->turn = turn;
    } else
        while (sh->turn.load() < turn) usleep(5);
}

__device__ __forceinline__ void st_ll(void* p, unsigned a, unsigned f, unsigned b) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(a), "r"(f), "r"(b), "r"(f)
                 : "memory");
}
__device__ __forceinline__ void ld_ll(const void* p, unsigned& a, unsigned& f, unsigned& b, unsigned& g) {
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a), "=r"(f), "=r"(b), "=r"(g)
                 : "l"(p)
                 : "memory");
}
__device__ __forceinline__ void st_rel(unsigned long long* p, unsigned long long v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ unsigned long long ld_acq(const unsigned long long* p) {
    unsigned long long v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// The number of the call is in GPU memory, so that a graph can be replayed; the last CTA to end counts it.
__device__ __forceinline__ void end_call(unsigned long long* epoch, unsigned long long e) {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(epoch + 1, 1ull) == gridDim.x - 1) {
        epoch[1] = 0;
        __threadfence();
        *(volatile unsigned long long*)epoch = e;
    }
}
template <int NP>
__global__ void __launch_bounds__(512) one_shot(Peers pe, int rank, size_t pairs) {
    __shared__ unsigned long long s_e;
    unsigned long long* epoch = (unsigned long long*)(pe.base[rank] + O_EPOCH);
    if (threadIdx.x == 0) s_e = *(volatile unsigned long long*)epoch + 1;
    __syncthreads();
    const unsigned e = (unsigned)s_e | 0x80000000u;
    const size_t par = (s_e & 1) * (MAXP * 2 * LLMAX);
    const uint2* in = (const uint2*)(pe.base[rank] + O_IN);
    float2* out = (float2*)(pe.base[rank] + O_OUT);
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < pairs;
         i += (size_t)gridDim.x * blockDim.x) {
        uint2 v = in[i];
#pragma unroll
        for (int k = 1; k < NP; k++) {
            int p = (rank + k) % NP;
            st_ll(pe.base[p] + O_LL + par + rank * 2 * LLMAX + i * 16, v.x, e, v.y);
        }
        float2 acc = {0, 0};
#pragma unroll
        for (int p = 0; p < NP; p++) {
            float2 w;
            if (p == rank)
                w = {__uint_as_float(v.x), __uint_as_float(v.y)};
            else {
                unsigned a, f, b, g;
                do ld_ll(pe.base[rank] + O_LL + par + p * 2 * LLMAX + i * 16, a, f, b, g);
                while (f != e || g != e);
                w = {__uint_as_float(a), __uint_as_float(b)};
            }
            acc.x += w.x;
            acc.y += w.y;
        }
        out[i] = acc;
    }
    end_call(epoch, s_e);
}

// The one-shot with what a safe engine adds: an owner word (overlap is an error), tickets for slices, a hash
// of the call in an entry packet per slice, a spin limit that looks at an abort word.
template <int NP>
__global__ void __launch_bounds__(512)
    one_shot_checked(Peers pe, int rank, size_t pairs, unsigned launch_id, unsigned hash, int slices) {
    __shared__ unsigned long long s_e;
    __shared__ int s_slice, s_bad;
    unsigned long long* c =
        (unsigned long long*)(pe.base[rank] + O_EPOCH);  // epoch, left, owner, ticket, stop
    if (threadIdx.x == 0) {
        unsigned long long old = atomicCAS(c + 2, 0ull, (unsigned long long)launch_id | 1ull << 40);
        s_bad = old != 0 && old != ((unsigned long long)launch_id | 1ull << 40);
        s_e = *(volatile unsigned long long*)c + 1;
        s_slice = gridDim.x == 1 ? 0 : (int)atomicAdd(c + 3, 1ull);
    }
    __syncthreads();
    const unsigned e = (unsigned)s_e | 0x80000000u;
    const int parity = s_e & 1;
    const size_t par = parity * (MAXP * 2 * LLMAX);
    const uint2* in = (const uint2*)(pe.base[rank] + O_IN);
    float2* out = (float2*)(pe.base[rank] + O_OUT);
    if (s_bad) return;
    while (s_slice < slices) {
        const int slice = s_slice;
        char* mine = pe.base[rank] + O_ENTRY + ((size_t)parity * MAXB + slice) * MAXP * 16;
        const size_t per = (pairs + slices - 1) / slices, first = slice * per,
                     last = first + per < pairs ? first + per : pairs;
        if (threadIdx.x < NP && threadIdx.x != rank) {
            __threadfence_system();
            st_ll(pe.base[threadIdx.x] + O_ENTRY + ((size_t)parity * MAXB + slice) * MAXP * 16 + rank * 16,
                  hash, e, hash * 7u);
        }
        for (size_t i = first + threadIdx.x; i < last; i += blockDim.x) {
            uint2 v = in[i];
#pragma unroll
            for (int k = 1; k < NP; k++) {
                int p = (rank + k) % NP;
                st_ll(pe.base[p] + O_LL + par + rank * 2 * LLMAX + i * 16, v.x, e, v.y);
            }
        }
        if (threadIdx.x < NP && threadIdx.x != rank) {
            unsigned a, f, b, g, spins = 0;
            do {
                ld_ll(mine + threadIdx.x * 16, a, f, b, g);
                if (++spins % 8192 == 0 && *(volatile unsigned long long*)(c + 4)) break;
            } while (f != e || g != e);
            if (a != hash) c[4] = 1;
        }
        __syncthreads();
        for (size_t i = first + threadIdx.x; i < last; i += blockDim.x) {
            uint2 v = in[i];
            float2 acc = {0, 0};
#pragma unroll
            for (int p = 0; p < NP; p++) {
                float2 w;
                if (p == rank)
                    w = {__uint_as_float(v.x), __uint_as_float(v.y)};
                else {
                    unsigned a, f, b, g, spins = 0;
                    do {
                        ld_ll(pe.base[rank] + O_LL + par + p * 2 * LLMAX + i * 16, a, f, b, g);
                        if (++spins % 8192 == 0 && *(volatile unsigned long long*)(c + 4)) break;
                    } while (f != e || g != e);
                    w = {__uint_as_float(a), __uint_as_float(b)};
                }
                acc.x += w.x;
                acc.y += w.y;
            }
            out[i] = acc;
        }
        if (gridDim.x == 1) {
            if (slice + 1 >= slices) break;
            __syncthreads();
            if (threadIdx.x == 0) s_slice = slice + 1;
        } else {
            __syncthreads();
            if (threadIdx.x == 0) s_slice = (int)atomicAdd(c + 3, 1ull);
        }
        __syncthreads();
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(c + 1, 1ull) == gridDim.x - 1) {
        c[1] = 0;
        c[3] = 0;
        *(volatile unsigned long long*)c = s_e;
        __threadfence();
        *(volatile unsigned long long*)(c + 2) = 0;
    }
}
template <int NP>
__device__ __forceinline__ void sync_peers(const Peers& pe, int rank, unsigned long long e, int which) {
    __syncthreads();
    if (threadIdx.x < NP) {
        st_rel(
            (unsigned long long*)(pe.base[threadIdx.x] + O_FLAG) + (which * MAXB + blockIdx.x) * MAXP + rank,
            e);
        while (ld_acq((unsigned long long*)(pe.base[rank] + O_FLAG) + (which * MAXB + blockIdx.x) * MAXP +
                      threadIdx.x) < e);
    }
    __syncthreads();
}
template <int NP, int U>
__global__ void __launch_bounds__(512)
    two_shot(Peers pe, int rank, size_t vecs) {  // vecs of float4 in all, a multiple of NP
    __shared__ unsigned long long s_e;
    unsigned long long* epoch = (unsigned long long*)(pe.base[rank] + O_EPOCH);
    if (threadIdx.x == 0) s_e = *(volatile unsigned long long*)epoch + 1;
    __syncthreads();
    const unsigned long long e = s_e;
    sync_peers<NP>(pe, rank, e, 0);
    const size_t share = vecs / NP, first = rank * share, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < share; i += step * U) {
        float4 acc[U];
#pragma unroll
        for (int u = 0; u < U; u++) acc[u] = {0, 0, 0, 0};
#pragma unroll
        for (int p = 0; p < NP; p++)
#pragma unroll
            for (int u = 0; u < U; u++) {
                size_t j = i + u * step;
                if (j < share) {
                    float4 w = __ldcs((const float4*)(pe.base[p] + O_IN) + first + j);
                    acc[u].x += w.x;
                    acc[u].y += w.y;
                    acc[u].z += w.z;
                    acc[u].w += w.w;
                }
            }
#pragma unroll
        for (int p = 0; p < NP; p++)
#pragma unroll
            for (int u = 0; u < U; u++) {
                size_t j = i + u * step;
                if (j < share) __stcs((float4*)(pe.base[p] + O_OUT) + first + j, acc[u]);
            }
    }
    __threadfence_system();
    sync_peers<NP>(pe, rank, e, 1);
    end_call(epoch, e);
}
__global__ void empty() {}
template <int NP>
void launch(int kind, int B, const Peers& pe, int rank, size_t bytes, cudaStream_t s) {
    if (kind == 0)
        one_shot<NP><<<B, std::min<size_t>(512, std::max<size_t>(32, (bytes / 8 + B - 1) / B)), 0, s>>>(
            pe, rank, bytes / 8);
    else if (kind == 3) {
        static unsigned id;
        one_shot_checked<NP>
            <<<B, std::min<size_t>(512, std::max<size_t>(32, (bytes / 8 + B - 1) / B)), 0, s>>>(
                pe, rank, bytes / 8, ++id, (unsigned)bytes * 2654435761u, B);
    } else if (kind == 1)
        two_shot<NP, 4><<<B, 512, 0, s>>>(pe, rank, bytes / 16);
    else
        empty<<<1, 32, 0, s>>>();
}
static void run(int kind, int B, const Peers& pe, int rank, size_t bytes, cudaStream_t s) {
    if (P == 2)
        launch<2>(kind, B, pe, rank, bytes, s);
    else if (P == 4)
        launch<4>(kind, B, pe, rank, bytes, s);
    else
        launch<8>(kind, B, pe, rank, bytes, s);
}
static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
__global__ void fill(float* p, size_t n, float v) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = v + (float)(i % 7);
}
static int child(int rank) {
    g_rank = rank;
    CK(cudaSetDevice(0));
    char* arena;
    CK(cudaMalloc(&arena, TOTAL));
    CK(cudaMemset(arena, 0, TOTAL));
    CK(cudaIpcGetMemHandle(&sh->handle[rank], arena));
    CK(cudaDeviceSynchronize());
    barrier();
    Peers pe;
    for (int p = 0; p < P; p++)
        if (p == rank)
            pe.base[p] = arena;
        else
            CK(cudaIpcOpenMemHandle((void**)&pe.base[p], sh->handle[p], cudaIpcMemLazyEnablePeerAccess));
    cudaStream_t s;
    CK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    cudaEvent_t a, b;
    CK(cudaEventCreate(&a));
    CK(cudaEventCreate(&b));
    fill<<<256, 256, 0, s>>>((float*)(arena + O_IN), MAXN / 4, rank + 1);
    CK(cudaStreamSynchronize(s));
    barrier();
    if (rank == 0) {
        for (int i = 0; i < 2; i++)
            CK(cudaMemcpyAsync(arena + O_OUT, arena + O_IN, MAXN, cudaMemcpyDeviceToDevice, s));
        CK(cudaEventRecord(a, s));
        for (int i = 0; i < 10; i++)
            CK(cudaMemcpyAsync(arena + O_OUT, arena + O_IN, MAXN, cudaMemcpyDeviceToDevice, s));
        CK(cudaEventRecord(b, s));
        CK(cudaStreamSynchronize(s));
        float ms;
        CK(cudaEventElapsedTime(&ms, a, b));
        cudaDeviceProp d;
        CK(cudaGetDeviceProperties(&d, 0));
        printf("{\"gpu\": \"%s\", \"ranks\": %d, \"copy_gb_s\": %.0f}\n", d.name, P,
               2.0 * MAXN * 10 / ms / 1e6);
    }
    barrier();
    struct Case {
        const char* name;
        int kind, B;
        size_t bytes;
    };
    std::vector<Case> cases;
    cases.push_back({"empty", 2, 1, 8});
    for (size_t n : {8, 64, 512, 4096, 16384, 65536, 131072}) {
        for (int B : {1, 4, 8, 16}) {
            if (n < 4096 && B > 1) continue;
            if (n >= 16384 && B < 4) continue;
            cases.push_back({"one-shot", 0, B, n});
            cases.push_back({"checked", 3, B, n});
        }
    }
    if (!getenv("SHORT"))
        for (size_t n = 65536; n <= MAXN; n *= 4)
            for (int B : {4, 8, 16, 32, 64}) {
                if (B * P > 128 || (n < (1 << 20) && B > 16) || (n >= (16 << 20) && B < 16)) continue;
                cases.push_back({"two-shot", 1, B, n});
            }
    for (auto& c : cases) {
        CK(cudaMemsetAsync(arena + O_OUT, 0xff, c.bytes, s));
        CK(cudaStreamSynchronize(s));
        barrier();
        run(c.kind, c.B, pe, rank, c.bytes, s);
        CK(cudaStreamSynchronize(s));
        barrier();
        int bad = 0;
        if (c.kind != 2) {
            std::vector<float> h(std::min<size_t>(c.bytes, 4 << 20) / 4);
            size_t off = c.bytes / 4 - h.size();
            CK(cudaMemcpy(h.data(), arena + O_OUT + off * 4, h.size() * 4, cudaMemcpyDeviceToHost));
            for (size_t i = 0; i < h.size(); i++) {
                float want = P * (P + 1) / 2 + P * (float)((i + off) % 7);
                bad += h[i] != want;
            }
        }
        const int K = 20;
        cudaGraph_t g;
        cudaGraphExec_t x;
        CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < K; i++) run(c.kind, c.B, pe, rank, c.bytes, s);
        CK(cudaStreamEndCapture(s, &g));
        CK(cudaGraphInstantiate(&x, g, 0));
        std::vector<double> tg, te, tw;
        barrier();
        CK(cudaGraphLaunch(x, s));
        CK(cudaStreamSynchronize(s));
        for (int r = 0; r < 5; r++) {
            barrier();
            CK(cudaEventRecord(a, s));
            CK(cudaGraphLaunch(x, s));
            CK(cudaEventRecord(b, s));
            CK(cudaStreamSynchronize(s));
            float ms;
            CK(cudaEventElapsedTime(&ms, a, b));
            tg.push_back(ms * 1e3 / K);
        }
        int KE = c.bytes > (16 << 20) ? 10 : 100;
        for (int r = 0; r < 3; r++) {
            barrier();
            double t0 = now();
            for (int i = 0; i < KE; i++) run(c.kind, c.B, pe, rank, c.bytes, s);
            CK(cudaStreamSynchronize(s));
            te.push_back((now() - t0) * 1e6 / KE);
        }
        for (int r = 0; r < (c.bytes > (16 << 20) ? 5 : 100); r++) {
            double t0 = now();
            run(c.kind, c.B, pe, rank, c.bytes, s);
            CK(cudaStreamSynchronize(s));
            tw.push_back((now() - t0) * 1e6);
        }
        auto med = [](std::vector<double> v) {
            std::sort(v.begin(), v.end());
            return v[v.size() / 2];
        };
        double m[3] = {med(tg), med(te), med(tw)}, w[3];
        int tb = 0;
        for (int k = 0; k < 3; k++) {
            sh->t[rank] = m[k];
            sh->bad[rank] = bad;
            barrier();
            w[k] = 0;
            tb = 0;
            for (int p = 0; p < P; p++) w[k] = std::max(w[k], sh->t[p]), tb += sh->bad[p];
            barrier();
        }
        if (rank == 0) {
            printf(
                "{\"kernel\": \"%s\", \"ctas\": %d, \"bytes\": %zu, \"graph_us\": %.2f, \"enqueued_us\": "
                "%.2f, \"waited_us\": %.2f, \"wrong\": %d}\n",
                c.name, c.B, c.bytes, w[0], w[1], w[2], tb);
            fflush(stdout);
        }
        CK(cudaGraphExecDestroy(x));
        CK(cudaGraphDestroy(g));
    }
    barrier();
    return 0;
}
int main(int argc, char** argv) {
    P = argc > 1 ? atoi(argv[1]) : 2;
    sh = (Shared*)mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    std::vector<pid_t> kids;
    for (int r = 0; r < P; r++) {
        pid_t p = fork();
        if (!p) _exit(child(r));
        kids.push_back(p);
    }
    int rc = 0;
    for (auto p : kids) {
        int st;
        waitpid(p, &st, 0);
        if (st) {
            rc = 1;
            for (auto q : kids)
                if (q != p) kill(q, 9);
        }
    }
    return rc;
}
