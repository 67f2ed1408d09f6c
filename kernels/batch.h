// What one launch is told: a few tasks, each of which reduces its operands into one stretch of memory.
//
// Handed to kernels by value, so it stays within the 4 KiB that every GPU takes as parameters. src/device/cuda/batch.rs
// lays the same bytes out in Rust. Includes nothing: NVRTC has no headers.
#pragma once

namespace flexring {

constexpr int kTasks = 16;
constexpr int kOperands = 128;
// What a block may have at most.
constexpr int kMaxThreads = 512;

struct Operand {
    // As long as the task's destination; GPU memory, a peer's GPU memory, or mapped host memory.
    const void* at;
    // What each element is multiplied with as it is read, if `scaled`.
    double factor;
    unsigned long long scaled;
};

struct Task {
    void* into;
    // Elements.
    unsigned long long count;
    // Its operands are `operands[first]` to `operands[first + operands - 1]`, in their order of addition; at least one.
    unsigned int first;
    unsigned int operands;
    // How many ranks the result is divided by; 0 and 1: it is kept.
    unsigned int divide;
    unsigned int reserved;
};

// Block (x, y) of a grid works on task y, together with all other blocks of that y.
struct Batch {
    Task tasks[kTasks];
    Operand operands[kOperands];
};

static_assert(sizeof(Batch) == 16 * 32 + 128 * 24, "the layout that the host fills in");

}  // namespace flexring
