// The memory that the ranks of a node share for collectives which their kernels run themselves. The host's side of this layout is
// src/device/cuda/collective/layout.rs. Includes nothing, because NVRTC has no headers.
//
// A rank's memory on its GPU is one allocation, which the other ranks of the node map: a CollectiveState, then the inboxes
// Packet[2][ranks][short_bytes / 8], then the stages: input and output stages, each char[kMostSlices][kStages][kStageBytes].
#pragma once

namespace flexring {

// Ranks of a node that kernels can connect.
constexpr int kMostRanks = 16;
// Slices of a call: its parts, each of which one CTA runs from beginning to end.
constexpr int kMostSlices = 64;
// Bytes of a stage: what a slice moves in one round; and stages that it uses in turn.
constexpr int kStageBytes = 65536;
constexpr int kStages = 3;
// The rounds of a slice are counted in the lower bits of `ready` and `done`, calls in as many as remain.
constexpr int kRoundBits = 20;
constexpr int kEpochBits = 43;
// 64-bit words that describe a call to the other ranks.
constexpr int kCallWords = 4;
// Allocations of a rank that the other ranks have open, and its places in them that a call has: of its input and of its output.
constexpr int kMostMemories = 64;
constexpr int kPlaces = 2;
// Packets with which a rank enters a slice: the hash of its call, and in a call that may be direct its places.
constexpr int kEntryPackets = 1 + kPlaces;
// A place: where in an allocation, its number above that, and that the rank has it, or needs none.
constexpr int kOffsetBits = 48;
constexpr unsigned long long kPlaced = 1ull << 63;
constexpr unsigned long long kInMemory = 1ull << 62;
// How a call moves its data.
constexpr unsigned int kShort = 0;
constexpr unsigned int kStaged = 1;
// By the items of a Program.
constexpr unsigned int kListed = 2;
// By messages between pairs of ranks, each of which only the two know.
constexpr unsigned int kTransfers = 3;
// Bytes of a slot of a link: the longest message.
constexpr int kSlotBytes = 131072;
// Slots of a direction of a link, at most.
constexpr int kMostSlots = 64;
// Places that an item reads or writes, at most: kernels round sums of 16 bits once if all contributions are in one item.
constexpr int kMostPlaces = 1024;
// ProgramItem::flags: this rank's elements are multiplied by `factor`; the result is complete, and is divided.
constexpr unsigned int kScales = 1;
constexpr unsigned int kLast = 2;
// ProgramPlace::kind. Input, output, scratch memory and the copy of the input: `at` is an element. A message: `at` is its number in the
// call, from 0.
constexpr unsigned int kInputPlace = 0;
constexpr unsigned int kOutputPlace = 1;
constexpr unsigned int kScratchPlace = 2;
constexpr unsigned int kMessagePlace = 3;
constexpr unsigned int kCopyPlace = 4;
// How two elements are combined. The numbers of Arithmetic in src/device/mod.rs.
enum Operation : unsigned int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAnd = 4, kOr = 5, kXor = 6 };
// Bytes before the data of a message of a Transfer, which say what it belongs to.
constexpr int kHeaderBytes = 16;
// Transfer::kind.
constexpr unsigned int kSend = 0;
constexpr unsigned int kReceive = 1;
constexpr unsigned int kOwnCopy = 2;
// In CollectiveState::reported.
constexpr unsigned int kReportedDirect = 1u << 31;
// Why a kernel left without having completed its call.
constexpr unsigned int kNoFailure = 0;
// Another rank makes another call: `failed_rank`, `own_words` and `their_words` say which.
constexpr unsigned int kMismatch = 1;
// Another kernel of this communicator was running.
constexpr unsigned int kOverlap = 2;
// The communicator has ended, or an earlier call failed.
constexpr unsigned int kClosed = 3;
// The host wanted it to leave.
constexpr unsigned int kAbandoned = 4;
// A message is not the one that this rank expects: `failed_rank` has sent it; the first two of `own_words` and `their_words` are the
// headers, expected and received.
constexpr unsigned int kUnexpected = 5;
// What a kernel waits for.
constexpr unsigned int kWaitEntry = 1;
constexpr unsigned int kWaitData = 2;
constexpr unsigned int kWaitReady = 3;
constexpr unsigned int kWaitDone = 4;
constexpr unsigned int kWaitSlot = 5;
constexpr unsigned int kWaitHost = 6;
// A rank that receives from this one, and one that sends to it.
constexpr unsigned int kWaitReceiver = 7;
constexpr unsigned int kWaitSender = 8;

// 8 bytes of data in two halves. Each half has 32 bits of data, and above them the flag of its call, so that 8 bytes that arrive
// together are all that is needed: no fence, no count. The flag of call number `epoch` is 1 << 31 | (epoch & 0x7fffffff).
struct alignas(16) Packet {
    unsigned long long half[2];
};

// In GPU memory, and zero before the first launch but for `peers` and `memories`.
struct CollectiveState {
    // Used by this rank's kernels alone. The launch that runs, as its parameters name it; 0 if none does.
    unsigned long long owner;
    // The number of the last call that was completed, in kEpochBits bits. Above them what counts the CTAs of the kernel that runs:
    // collective.cu explains it. All 0 before the first call.
    unsigned long long epoch;
    // Not 0 while a thread has written `waiting_for`, which only one may do at a time.
    unsigned long long reporter;
    // Not 0 after a failure, so that the other CTAs leave.
    unsigned int stopped;
    // Set by the host: every later kernel leaves. After a failure they do so too.
    unsigned int closed;
    // What `direct` and `unplaced` of the status were set to: kReportedDirect, and 1 + a rank. Host memory is written once for all calls,
    // because the end of a kernel waits for that.
    alignas(8) unsigned int reported;
    // By rank, this rank included: where this GPU maps its state. Written by the host before the first launch.
    CollectiveState* peers[kMostRanks];
    // By rank, this rank included, and number: where this GPU maps an allocation; 0 for one of this rank that is not to be used any
    // more. Written by the host, before this rank or the other one names it in a call.
    unsigned long long memories[kMostRanks][kMostMemories];

    // Written by the other ranks, each in its own place. By parity of the call, slice and rank: the hash of its call, and, by this rank
    // too, the places of its input and output in this slice.
    alignas(128) Packet entry[2][kMostSlices][kMostRanks][kEntryPackets];
    // By parity and rank: the words of its call, for the message of a mismatch.
    Packet words[2][kMostRanks][kCallWords];
    // By slice and rank: epoch << kRoundBits | the rounds of that call that are staged, and that are complete. Only grow.
    alignas(128) unsigned long long ready[kMostSlices][kMostRanks];
    alignas(128) unsigned long long done[kMostSlices][kMostRanks];
    // Of the links of a Program. By the rank that sends: the message in each slot. By the rank that uses them: likewise.
    alignas(128) unsigned long long sent[kMostRanks][kMostSlots];
    alignas(128) unsigned long long used[kMostRanks][kMostSlots];
    // Of the links of Transfers, likewise.
    alignas(128) unsigned long long transfers_sent[kMostRanks][kMostSlots];
    alignas(128) unsigned long long transfers_used[kMostRanks][kMostSlots];
};

// A link to another rank, which may be on another node. Messages go through its slots: message n of a direction through slot n modulo
// `slots`, a power of two. The memory of a direction belongs to the rank that lets the other one write there; a transport may be in between.
struct ProgramLink {
    // Messages to the peer: their slots; by slot, the number of the message there, from 1, which this rank writes; and that of the
    // message that the peer has used last, which it writes.
    unsigned char* out;
    unsigned long long* out_sent;
    const unsigned long long* out_used;
    // Messages from the peer, likewise.
    const unsigned char* in;
    const unsigned long long* in_sent;
    unsigned long long* in_used;
    // Messages of earlier calls. Written at the end of a call.
    unsigned long long sent;
    unsigned long long received;
    unsigned int slots;
    // The rank at the other end.
    unsigned int rank;
};

// A part of a Program that one CTA runs: adds what is at its sources, and writes the sum to its destinations.
struct ProgramItem {
    unsigned int elements;
    unsigned int flags;
    // Its places in Program::places: sources, and behind them destinations.
    unsigned int first_place;
    // The items before it that it waits for, in Program::waits.
    unsigned int first_wait;
    unsigned short sources;
    unsigned short destinations;
    unsigned int waits;
};

struct ProgramPlace {
    unsigned int kind;
    // Of a message, its link in Program::links.
    unsigned int link;
    unsigned long long at;
};

// Messages of a call on a link.
struct LinkCount {
    unsigned int link;
    unsigned int sends;
    unsigned int receives;
};

// The work of a rank in calls of one kind and length, in GPU memory: crates/flexring-plan/src/device_program explains it.
struct Program {
    const ProgramItem* items;
    const ProgramPlace* places;
    const unsigned int* waits;
    ProgramLink* links;
    const LinkCount* counts;
    // By item, the number of the last call in which it was done.
    unsigned long long* done;
    unsigned char* scratch;
    unsigned char* copy;
    // Items that CTAs have taken. 0 between calls.
    unsigned long long taken;
    unsigned int item_count;
    unsigned int link_count;
};

// What this rank sends to another one, or receives from it, in messages of up to kSlotBytes with their headers; or copies from its own
// memory to its own.
struct Transfer {
    // What it reads and writes; null for the end that another rank has.
    const unsigned char* from;
    unsigned char* into;
    unsigned long long bytes;
    // What both ends must have equal: the type << 56 | elements.
    unsigned long long tag;
    // Messages of the call before it, in its direction of the link.
    unsigned int first;
    // How many messages it has: one at least.
    unsigned int messages;
    // In Transfers::links; of a copy, none.
    unsigned int link;
    unsigned int kind;
};

// What this rank moves in a call. In pinned host memory, as its Transfer are, which begin behind it.
struct Transfers {
    ProgramLink* links;
    // In GPU memory, and 0 between calls: messages that CTAs have taken, CTAs that have found no more, and by transfer the messages taken.
    unsigned long long* taken;
    // Of all.
    unsigned long long messages;
    unsigned long long count;
};

// In pinned host memory.
struct CollectiveStatus {
    // Written by kernels. What a kernel has waited for during the last millisecond or longer: the number of the call and
    // slice or item << 32 | kind of wait << 16 | rank. The kernel writes `waiting_epoch` last, and 0 there when the wait is over.
    unsigned long long waiting_for;
    unsigned long long waiting_epoch;
    // The first failure. `failure` is written last.
    unsigned long long failed_rank;
    unsigned long long failed_epoch;
    unsigned long long own_words[kCallWords];
    unsigned long long their_words[kCallWords];
    unsigned long long failure;
    // The launch that was completed last, of those that report it. Written by the last CTA to leave.
    unsigned long long completed;
    // Whether a call was direct, and 1 + a rank whose vectors had no places in one that could have been.
    unsigned long long direct;
    unsigned long long unplaced;
    // The launch whose messages the host is to carry. The host sets it to 0 when it begins.
    unsigned long long started;
    // Written by the host: every kernel leaves.
    alignas(128) unsigned long long aborted;
};

// The parameter of every kernel of collective.cu. A call is described by blocks of equal length: which ranks this one sends a block
// to, where the blocks begin, and which ranks' blocks it receives.
struct CollectiveParameters {
    CollectiveState* state;
    CollectiveStatus* status;
    // Not 0, and of no other launch that may run at the same time.
    unsigned long long launch;
    // Of what all ranks must have equal: the words. Both are sent to all ranks.
    unsigned long long hash;
    unsigned long long words[kCallWords];
    const void* input;
    void* output;
    // What this rank does, if the path is kListed, or kTransfers.
    Program* program;
    const Transfers* transfers;
    // The places of input and output, for a staged call that is direct if all ranks have theirs; all 0 if this rank has not.
    unsigned long long places[kPlaces];
    // Multiplies this rank's elements, rounded to their type, if `scales`.
    double factor;
    // Elements of a block.
    unsigned long long count;
    // By rank, in bits: who gets a block of the input, and whose blocks go into the output. This rank included.
    unsigned int sends;
    unsigned int receives;
    // Bytes from the block for one rank to that for the next in the input, and of the blocks of ranks in the output. 0 if all
    // are the same block. Whether `send_stride` is 0 must be the same on all ranks, because it divides the stages. Blocks received
    // are reduced, in the order of ranks, if `reduces`, and then have one place.
    unsigned long long send_stride;
    unsigned long long receive_stride;
    unsigned int reduces;
    // How elements are combined: an Operation; the number of ranks to divide the result by, 0 and 1 mean none.
    unsigned int operation;
    unsigned int divide;
    unsigned int scales;
    unsigned int rank;
    unsigned int ranks;
    // One of the paths; and the number of slices: functions of the call alone. No slices if not all ranks take part, so that the call
    // begins without entry packets, and is not counted.
    unsigned int path;
    unsigned int slices;
    // Bytes of a block that an inbox has room for.
    unsigned int short_bytes;
    // Whether the last CTA to leave writes `launch` to `completed`, after the result.
    unsigned int reports;
    // Whether the host carries messages of the call, and waits for `started`.
    unsigned int relayed;
};

// The rules of the protocol that tests break one by one, to see that they would notice.
enum Rule : unsigned int {
    kNoRule,
    kTwoParities,
    kClearAtWrap,
    kSlicesByTicket,
    kOneKernel,
    kEntriesOfAll,
    kOrderedWords,
    kSeveralStages,
    kWaitForDone,
    kOutputAfterEntries,
    kPlacesSentOnce,
    kWaitForReaders,
    kWaitForItems,
    kWaitForMessages,
    kWaitForSlots,
    kItemsInOrder,
    kAnyTransfer,
    kHeadersCompared,
    kRules,
};

}  // namespace flexring
