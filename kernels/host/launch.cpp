// Runs the kernels on a CPU; see kernels.h.
#include "kernels.h"

#include <memory>

#include "../collective.cu"

namespace flexring {
namespace {

struct NamedKernel {
    const char* name;
    Kernel kernel;
    unsigned element;
};

#define FLEXRING_NAMED(name, Type) {"flexring_collective_" #name, flexring_collective_##name, sizeof(Type::Stored)},
constexpr NamedKernel kKernels[] = {FLEXRING_TYPES(FLEXRING_NAMED)};

const NamedKernel* find(const char* name) {
    for (const NamedKernel& named : kKernels) {
        if (std::strcmp(named.name, name) == 0) return &named;
    }
    return nullptr;
}

// A machine whose addresses are those of the host, and that nothing waits on.
class PlainMachine final : public Machine {
  public:
    void* reach(void* at, u64, u32, bool) override { return at; }
    void* reach_shared(void* at, u64, bool) override { return at; }
    void end_reach() override {}
    void pause() override { std::abort(); }
    void published(const void*) override {}
};

}  // namespace

const unsigned largest_block = kMaxThreads;

Kernel kernel_named(const char* name) {
    const NamedKernel* const named = find(name);
    return named ? named->kernel : nullptr;
}

void run_cta(Kernel kernel, const CollectiveParameters& parameters, unsigned grid, unsigned cta, Machine& machine) {
    gridDim = {grid, 1, 1};
    blockDim = {1, 1, 1};
    blockIdx = {cta, 0, 0};
    threadIdx = {0, 0, 0};
    flexring::machine = &machine;
    kernel(parameters);
    flexring::machine = nullptr;
}

void break_rule(unsigned rule) { broken_rule = rule; }

}  // namespace flexring

// Adds `count` elements at each of `operands` addresses, by the list of a rank that is alone. Elements at addresses that are marked
// with kScaled are multiplied by `factor`. Returns 0, or -1 if there is no kernel of that name, or there are too many operands.
extern "C" int flexring_host_sum(const char* kernel, const unsigned long long* operands, unsigned count_of_operands, void* into,
                                 unsigned long long count, unsigned operation, unsigned divide, double factor) {
    using namespace flexring;
    const NamedKernel* const named = find(kernel);
    if (!named || count_of_operands == 0 || count_of_operands >= kMostPlaces) return -1;
    static thread_local const std::unique_ptr<CollectiveState> state(new CollectiveState{});
    static thread_local CollectiveStatus status{};
    state->peers[0] = state.get();
    std::vector<ProgramItem> items;
    std::vector<ProgramPlace> places;
    bool scales = false;
    for (u64 first = 0, longest = kSlotBytes / named->element; first == 0 || first < count; first += longest) {
        ProgramItem item{};
        item.elements = static_cast<u32>(count - first < longest ? count - first : longest);
        item.first_place = static_cast<u32>(places.size());
        item.sources = static_cast<unsigned short>(count_of_operands), item.destinations = 1;
        // The rank's vectors begin at address 0. Those that are multiplied are its input.
        for (u32 nth = 0; nth < count_of_operands; ++nth) {
            const bool scaled = (operands[nth] & kScaled) != 0;
            scales = scales || scaled;
            places.push_back({scaled ? kInputPlace : kScratchPlace, 0, (operands[nth] & ~kScaled) / named->element + first});
        }
        places.push_back({kOutputPlace, 0, reinterpret_cast<u64>(into) / named->element + first});
        items.push_back(item);
    }
    for (ProgramItem& item : items) item.flags = kLast | (scales ? kScales : 0);
    std::vector<u64> done(items.size());
    Program program{};
    program.items = items.data(), program.places = places.data(), program.done = done.data();
    program.item_count = static_cast<u32>(items.size());
    CollectiveParameters call{};
    call.state = state.get(), call.status = &status, call.program = &program;
    call.launch = 1, call.ranks = 1, call.slices = 1, call.path = kListed;
    call.operation = operation, call.divide = divide, call.factor = factor;
    PlainMachine machine;
    run_cta(named->kernel, call, 1, 0, machine);
    return status.failure == kNoFailure ? 0 : -1;
}
