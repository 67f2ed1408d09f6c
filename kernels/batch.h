// Kernel launch parameters: a few tasks, each of which reduces its operands into one range of memory.
//
// Passed to kernels by value, so the size stays within the 4 KiB of parameters that every GPU accepts.
// src/device/cuda/batch.rs has the same layout in Rust. Includes nothing, because NVRTC has no headers.
#pragma once

namespace flexring {

constexpr int kTasks = 16;
constexpr int kOperands = 128;
// The largest number of threads in a block.
constexpr int kMaxThreads = 512;

struct Operand {
    // As many elements as the destination has, in GPU memory, a peer's GPU memory, or mapped host memory.
    const void* at;
    // Each element is multiplied with this when it is read, if `scaled` is not 0.
    double factor;
    unsigned long long scaled;
};

struct Task {
    void* into;
    // Number of elements; of bytes for a copy.
    unsigned long long count;
    // The operands are `operands[first]` to `operands[first + operands - 1]` of the batch, in order of addition; at least one.
    unsigned int first;
    unsigned int operands;
    // The number of ranks to divide the result by; 0 and 1 mean no division.
    unsigned int divide;
    unsigned int reserved;
};

// Block (x, y) of a grid works on task y, together with all other blocks of that y.
struct Batch {
    Task tasks[kTasks];
    Operand operands[kOperands];
};

static_assert(sizeof(Batch) == 16 * 32 + 128 * 24, "the size must match src/device/cuda/batch.rs");

}  // namespace flexring
