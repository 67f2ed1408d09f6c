//! Collectives on GPU memory that kernels run themselves.
//!
//! Owns which calls these are, and how they are launched or captured. Must not know how a kernel works.

use crate::call::{BlockCounts, Call, Collective};
use crate::communicator::Communicator;
use crate::communicator::checked_call::CheckedCall;
use crate::communicator::gpu_state::{
    CarriedCall, KernelOffer, KernelOwner, KernelState, KernelWatch, OfferedMemory, OpenedGpu,
    PreparedCollective, RelayedCall, difference, forbid_calls,
};
use crate::communicator::launch_group::Launch;
use crate::communicator::registration_gate::permit;
use crate::communicator::request::{CallOutcome, WaitCheck};
use crate::communicator::runner::{CallRunner, QueuedCall, QueuedWork};
use crate::device::CallerStream;
use crate::device::cuda::Launcher;
use crate::device::cuda::collective::{
    BlockCall, Blocks, CALL_WORDS, ListedProgram, MOST_PLACES, SLOT, TransferTable, Vector, VectorTransfer,
};
use crate::device::kernel_start::wait_started;
use crate::device::relay_link::RelayedMessages;
use crate::error::{Error, ErrorKind, Result};
use crate::executor::AnnouncedCall;
use crate::memory::Piece;
use crate::process::CreatorProcess;
use crate::rank::Rank;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

impl Launch for PreparedCollective {
    fn launch(&mut self) -> Result<()> {
        Self::launch(self)
    }

    fn record(self: Box<Self>) -> Result<()> {
        Self::record(*self)
    }
}

impl CallRunner {
    /// The kernels of this rank, if its GPU is open.
    pub(in crate::communicator) fn offer_kernels(&self) -> Option<KernelOffer> {
        let (opened, calls) = self.gpu_state.kernel_state()?;
        // The memory is laid out for one rank if there are too many on the node.
        let is_laid_out = self.node.len() == 1 || !calls.memory.layout().is_alone();
        Some(opened.offer(is_laid_out && self.memory_of(&self.node).is_some()))
    }

    /// The ranks whose kernels reach each other's GPU memory.
    fn kernel_node(&self) -> &[Rank] {
        self.kernel_node.get().map_or(std::slice::from_ref(&self.rank), Vec::as_slice)
    }

    /// Whether kernels exchange messages with this rank by way of the hosts.
    fn is_relayed(&self, rank: Rank) -> bool {
        !self.kernel_node().contains(&rank)
    }

    /// Whether there are such ranks.
    fn relays(&self) -> bool {
        self.kernel_node().len() < self.world
    }

    /// Whether kernels can be launched.
    pub(in crate::communicator) fn are_kernels_connected(&self) -> bool {
        self.gpu_state.kernel_state().is_some_and(|(_, calls)| calls.watch().is_some())
    }

    /// Connects the memory of the ranks that reach each other's, once this rank's GPU is open.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(in crate::communicator) fn connect_kernels(self: &Arc<Self>) -> Result<()> {
        let Some((_, calls)) = self.gpu_state.kernel_state().filter(|(_, calls)| calls.watch().is_none())
        else {
            return Ok(());
        };
        let (node, timeout) = (self.kernel_node(), self.timeout);
        let memory = self.memory_of(node);
        let memory = memory.ok_or_else(|| Error::internal("the memory of a GPU is not open any more"))?;
        let slots = self.lock_state().executor.relay_slots();
        let slots: Vec<_> = slots.into_iter().filter(|slots| self.is_relayed(slots.peer)).collect();
        if !slots.is_empty() {
            self.gpu_state.populate_relays()?;
        }
        let owner: Weak<dyn KernelOwner> = Arc::downgrade(self) as _;
        calls.connect(&memory, slots, owner, &self.fault, (self.rank, node, self.world), timeout)?;
        log::debug!(
            "rank {}: kernels of up to {} CTAs run calls on GPU memory, and reach that of {} of {} ranks",
            self.rank,
            self.kernel_ctas.load(Ordering::Relaxed),
            node.len(),
            self.world
        );
        Ok(())
    }

    /// By their places among `ranks`, the GPU memory of the other ones as this process has it open; `None` if
    /// one is missing.
    fn memory_of(&self, ranks: &[Rank]) -> Option<Vec<Option<Piece>>> {
        let opened = self.lock_state().executor.opened_gpus();
        let of = |rank: &Rank| opened.iter().find(|(peer, _)| peer == rank).map(|(_, piece)| *piece);
        let memory: Vec<_> = ranks.iter().map(of).collect();
        let is_there = |(rank, memory): (&Rank, &Option<_>)| *rank == self.rank || memory.is_some();
        ranks.iter().zip(&memory).all(is_there).then_some(memory)
    }

    /// The items by which this rank's kernels run a call.
    fn list(
        &self,
        checked: &CheckedCall,
        calls: &KernelState,
        is_captured: bool,
    ) -> Result<Arc<ListedProgram>> {
        let key = self.lock_plans().list_key(checked, SLOT);
        let make = || self.lock_plans().list(key, checked, SLOT, MOST_PLACES);
        let is_elsewhere = |rank: Rank| self.is_relayed(rank);
        calls.list(key, checked.dtype.size(), is_elsewhere, is_captured, || self.wait_full(), make)
    }

    /// The transfers of a call, where its kernel finds them, and what is carried between nodes.
    fn transfers(
        &self,
        checked: &CheckedCall,
        calls: &KernelState,
        is_captured: bool,
    ) -> Result<(TransferTable, Arc<[RelayedMessages]>)> {
        let world = (self.world, |rank: Rank| self.is_relayed(rank));
        let transfers = transfers_of(checked, self.rank, self.world);
        calls.transfers(&transfers, world, is_captured, || self.wait_full())
    }

    /// Waits a moment for a kernel to end, because what calls use is all in use.
    ///
    /// # Errors
    /// The failure of the communicator.
    fn wait_full(&self) -> Result<()> {
        std::thread::sleep(FULL_WAIT);
        self.check_waiting();
        self.fault.check()
    }

    /// Carries the messages of calls that kernels run, behind this number of collectives that need no
    /// messages to be carried.
    pub(in crate::communicator) fn run_relayed(&self, relayed: RelayedCall, kernels: u64) -> Result<()> {
        let Some((_, calls)) = self.gpu_state.kernel_state() else {
            return Err(Error::internal("messages of kernels without a GPU"));
        };
        let _no_driver = forbid_calls();
        let memory = &calls.memory;
        let RelayedCall::Launched(own, carried) = relayed else {
            let mut last = Instant::now();
            while last.elapsed() < LINGER {
                let Some(launch) = memory.started() else {
                    std::thread::yield_now();
                    continue;
                };
                // Not a captured one: its turn comes.
                let Some(carried) = calls.captured(launch) else { break };
                memory.take_started();
                self.carry(&carried, 0)?;
                last = Instant::now();
            }
            calls.watch().inspect(|watch| watch.end_replays());
            return Ok(());
        };
        loop {
            let has_started = || memory.started().is_some();
            let started = wait_started(has_started, &self.fault, self.spin, &self.leaving);
            started.map_err(|failure| self.fail(failure))?;
            let launch = memory.started();
            memory.take_started();
            if launch == Some(own) {
                return self.carry(&carried, kernels);
            }
            // A graph was launched before.
            if let Some(carried) = launch.and_then(|launch| calls.captured(launch)) {
                self.carry(&carried, 0)?;
            }
        }
    }

    /// Carries the messages of a call whose kernel runs.
    fn carry(&self, carried: &CarriedCall, kernels: u64) -> Result<()> {
        let mut state = self.lock_state();
        self.check_usable()?;
        let is_collective = carried.call.is_collective();
        state.count_call(kernels, is_collective);
        let call = Call { sequence: state.sequence + u64::from(!is_collective), ..carried.call };
        let fail = |failure: Error| {
            let differs = carried.is_captured && failure.kind() == ErrorKind::Disagreement;
            self.fail(if differs { failure.context("in the launch of a graph") } else { failure })
        };
        let announced = AnnouncedCall { call: &call, blocks: carried.blocks.as_ref() };
        let outcome = self.enter(&call).map_err(fail);
        let outcome = outcome.and_then(|()| state.executor.relay(announced, &carried.messages, &fail));
        self.control.leave_call();
        if outcome.is_err() {
            state.executor.write_trace();
        }
        outcome
    }

    /// Waits until all kernels that were launched have ended, or the communicator has failed.
    pub(in crate::communicator) fn await_kernels(&self) {
        if let Some((opened, calls)) = self.gpu_state.kernel_state() {
            calls.await_kernels(&opened.launcher, &self.fault, || self.check_waiting());
        }
    }

    /// Reports that this rank has finished its last call, if kernels ran that. The rank is about to leave.
    pub(in crate::communicator) fn finish_kernel_calls(&self) {
        let watch = self.gpu_state.kernel_state().and_then(|(_, calls)| calls.watch());
        let last = watch.and_then(|watch| watch.last_call());
        let Some(last) = last.filter(|last| last.sequence > self.lock_state().sequence) else { return };
        if self.fault.get().is_none() && self.control.enter_call(&last).is_ok() {
            self.control.leave_call();
        }
    }

    /// Has the kernels of all ranks access memory that the user has registered, if they can.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(in crate::communicator) fn offer_to_kernels(&self, piece: Piece) -> Result<()> {
        let calls = self.gpu_state.kernel_state().filter(|_| !self.relays());
        let registered = calls.and_then(|(_, calls)| calls.registered.as_ref());
        registered.map_or(Ok(()), |registered| registered.add(piece))
    }

    /// Undoes one [`offer_to_kernels`](Self::offer_to_kernels).
    ///
    /// # Errors
    /// `Timeout` if kernels use it for too long; `System` if the GPU fails.
    pub(in crate::communicator) fn take_from_kernels(&self, piece: Piece) -> Result<()> {
        let Some((opened, calls)) = self.gpu_state.kernel_state() else { return Ok(()) };
        calls.forget(piece, &opened.launcher, &self.fault, self.timeout)
    }

    /// Opens the memory that other ranks have registered, once the kernels that were launched have ended.
    /// Opening would wait for them, too, but with a lock of the driver. They end, because they depend on no
    /// later collective of this rank. A receive among them may depend on a later send of the host, as any
    /// earlier call in a stream may.
    fn follow_registrations(&self, launcher: &Launcher, calls: &KernelState) {
        if let Some(registered) = calls.registered.as_ref().filter(|registered| registered.has_changed()) {
            calls.await_kernels(launcher, &self.fault, || self.check_waiting());
            // If it has failed, a kernel may still run.
            if self.fault.get().is_none() {
                registered.follow();
            }
        }
    }

    /// Ends the communicator if a kernel has failed: a kernel that has ended may have.
    pub(in crate::communicator) fn notice_kernel_failure(&self) {
        if let Some(watch) = self.gpu_state.kernel_state().and_then(|(_, calls)| calls.watch()) {
            watch.notice_failure();
        }
    }
}

impl KernelOwner for CallRunner {
    fn fail(&self, error: Error) {
        Self::fail(self, error);
    }

    fn leaver(&self) -> Option<Rank> {
        self.control.leaver()
    }

    fn carry_replays(self: Arc<Self>) {
        let Some(submit) = self.submit.get() else { return };
        let check: Weak<dyn WaitCheck> = Arc::downgrade(&self) as _;
        let queued = QueuedCall {
            ticket: None,
            work: Some(QueuedWork::Relayed(RelayedCall::Replayed)),
            running: None,
            outcome: Arc::new(CallOutcome::new(check, CreatorProcess::current())),
        };
        if let Err(error) = submit(&self, queued) {
            self.fail(error);
        }
    }

    fn set_kernel_call(&self, call: Option<Call>) {
        // Adaptation makes calls of its own, which kernels within a node do not count.
        if self.adaptation.is_none() {
            self.control.set_kernel_call(call);
        }
    }
}

impl Communicator {
    /// What a kernel needs to know of a call; `None` if the host runs it.
    fn described(&self, checked: &CheckedCall) -> Option<DescribedCall<'_>> {
        let runner = &self.runner;
        let (opened, calls) = runner.gpu_state.kernel_state()?;
        let watch = calls.watch()?;
        let (plans, are_automatic) = {
            let plans = runner.lock_plans();
            (plans.kernel_digest(), plans.are_automatic())
        };
        // Short calls need no plan, and what is only moved within a node neither: blocks are bytes there.
        let follows_plan = runner.relays()
            || !are_automatic
                && !runner.uses_mailboxes(checked)
                && checked.collective.reduces()
                && checked.count > 0
                && !calls.memory.layout().is_alone();
        let call = CallRunner::call(checked, 0, if follows_plan { plans ^ BY_KERNEL } else { plans });
        // Also where this rank has no elements, and so no memory on a GPU.
        let call = Call { on_gpu: true, ..call };
        let described = described_to_kernel(checked, runner, words_of(&call));
        // Kernels that exchange relayed messages only need no equal number.
        let ctas = runner.kernel_ctas.load(Ordering::Relaxed);
        let is_alone = calls.memory.layout().is_alone();
        let ctas = if is_alone { ctas.min(opened.most_alone(runner.node.len())) } else { ctas };
        let work = match checked.collective {
            Collective::Barrier => return None,
            Collective::SendRecv if checked.peers().next().is_none() => return None,
            Collective::SendRecv | Collective::AllToAllV => KernelWork::Transfers,
            _ if checked.is_empty() => return None,
            Collective::AllToAll if runner.relays() => KernelWork::Transfers,
            _ if follows_plan => KernelWork::List,
            _ => KernelWork::Blocks(Blocks::new(&described, calls.memory.layout(), ctas)?),
        };
        Some(DescribedCall { opened, calls, watch, call, described, ctas, work })
    }

    /// Launches a call in a stream, or has the stream's capture take it in, if it is one that kernels run.
    /// `awaited`: the caller waits for the outcome, which otherwise is that of the launch. `None` if the host
    /// runs the call.
    ///
    /// # Errors
    /// As for [`submit_in_stream`](Self::submit_in_stream); `Disagreement` if the ranks capture different
    /// calls.
    pub(in crate::communicator) fn run_by_kernel(
        &self,
        checked: &CheckedCall,
        stream: CallerStream,
        other: Option<CallerStream>,
        awaited: bool,
    ) -> Result<Option<Arc<CallOutcome>>> {
        let runner = &self.runner;
        let Some(described) = self.described(checked) else { return Ok(None) };
        let DescribedCall { opened, calls, watch, mut call, described, ctas, mut work } = described;
        let is_collective = checked.is_collective();
        watch.notice_failure();
        runner.check_usable()?;
        for piece in checked.pieces() {
            runner.gpu_state.serves(piece.memory())?;
        }
        let fail = |error: Error| if error.kind() == ErrorKind::System { runner.fail(error) } else { error };
        let streams = opened.launcher.check_streams(stream, other).map_err(fail)?;
        if !matches!(work, KernelWork::Transfers) {
            runner.follow_registrations(&opened.launcher, calls);
        }
        // A replay of this call beside that of another one is found.
        let mut capture = None;
        let is_captured = streams.are_captured();
        if is_captured {
            if runner.launch_member.is_some() {
                return Err(Error::unsupported(
                    "the stream is being captured, and other ranks are threads of this process: run each rank in a process of its own",
                ));
            }
            let named = calls.registered.as_ref().map_or(0, OfferedMemory::named);
            // Only the ranks of a message know of it, so they cannot compare it.
            if is_collective && self.agree_on_capture(described.words, named)? {
                // All have named what they have registered so far; then all have opened it.
                runner.follow_registrations(&opened.launcher, calls);
                self.barrier()?;
            }
            capture = is_collective.then(|| calls.next_capture());
        }
        if let KernelWork::Blocks(blocks) = &mut work {
            set_places(checked, blocks, calls).map_err(fail)?;
        }
        let _call = self.begin_call()?;
        // Ranks launch in one order.
        let submissions = self.lock_submissions();
        let (mut messages, mut copied) = (None, None);
        let mut blocks = match work {
            KernelWork::Blocks(blocks) => blocks,
            KernelWork::Transfers => {
                let mut moved = checked.clone();
                if checked.in_place {
                    // Blocks would be overwritten before they are sent.
                    let copy = calls.memory.copy_of_input(checked.input.len());
                    moved.input = copy.map_err(|error| runner.fail(error))?;
                    copied = Some(moved.input);
                }
                let outcome = runner.transfers(&moved, calls, is_captured);
                let (table, carried) = outcome.map_err(|error| runner.fail(error))?;
                messages = Some(carried).filter(|carried| !carried.is_empty());
                Blocks::transfers(&described, calls.memory.layout(), ctas, table)
            }
            KernelWork::List => {
                // The other ranks wait for this one now.
                let list = runner.list(checked, calls, is_captured).map_err(|error| runner.fail(error))?;
                if is_captured {
                    calls.memory.keep_list(&list);
                }
                // Also without messages of this rank, so that its thread counts the call as those of others
                // do.
                messages = runner.relays().then(|| Arc::clone(list.relayed()));
                Blocks::listed(&described, calls.memory.layout(), ctas, &list)
            }
        };
        if messages.is_some() {
            blocks.set_relayed();
        }
        if let Some(number) = capture {
            blocks.set_capture(number);
        }
        if is_captured {
            watch.note(None);
        } else if is_collective {
            let queue = &runner.queue;
            call.sequence = if messages.is_some() { queue.count_collective() } else { queue.count_kernel() };
            watch.note(Some(call));
        }
        let awaited = awaited && !is_captured;
        // Once for what follows, unless it waits for the threads of other ranks, where the program's own code
        // may run.
        let alone = runner.launch_member.is_none();
        let _entered =
            alone.then(|| opened.launcher.enter()).transpose().map_err(|error| runner.fail(error))?;
        let vectors = (checked.input, checked.output);
        let mut prepared =
            opened.launcher.prepare_collective(streams, &calls.memory, &blocks, vectors, awaited);
        copied.inspect(|copy| prepared.copy_first(checked.input, *copy));
        let launch = prepared.number();
        let (permit, running) = permit();
        if let Some(messages) = messages {
            call.program ^= capture.unwrap_or(0);
            let carried = CarriedCall { call, blocks: checked.blocks.clone(), messages, is_captured };
            if is_captured {
                calls.keep_captured(launch, carried);
            } else {
                let relayed = RelayedCall::Launched(launch, carried);
                self.enqueue(&submissions, QueuedWork::Relayed(relayed), Some(running))?;
            }
        }
        runner.launch(prepared, checked.collective, permit).map_err(|error| runner.fail(error))?;
        let check: Weak<dyn WaitCheck> = Arc::downgrade(runner) as _;
        let outcome = Arc::new(CallOutcome::new(check, self.creator));
        if awaited {
            watch.expect(launch, Arc::clone(&outcome));
        } else {
            outcome.end(Ok(()));
        }
        Ok(Some(outcome))
    }

    /// Checks that all ranks capture the same call now. Whether one has named memory; `named`: how often this
    /// one has.
    fn agree_on_capture(&self, mine: [u64; CALL_WORDS], named: u64) -> Result<bool> {
        let mut words = [named; CALL_WORDS + 1];
        words[..CALL_WORDS].copy_from_slice(&mine);
        let mut all = vec![0; words.len() * self.size()];
        self.all_gather(&words, &mut all)?;
        let mut any_named = false;
        for (rank, theirs) in all.chunks_exact(words.len()).enumerate() {
            any_named |= theirs[CALL_WORDS] != 0;
            let theirs = std::array::from_fn(|word| theirs[word]);
            if theirs != mine {
                return Err(Error::disagreement(format!(
                    "captures differ: {}",
                    difference(self.rank(), mine, rank, theirs, 0)
                )));
            }
        }
        Ok(any_named)
    }
}

/// A call that kernels run, and what runs it.
struct DescribedCall<'a> {
    opened: &'a OpenedGpu,
    calls: &'a KernelState,
    watch: &'a Arc<KernelWatch>,
    call: Call,
    described: BlockCall,
    /// The most CTAs of a kernel.
    ctas: u32,
    work: KernelWork,
}

/// What a kernel does in a call.
#[allow(clippy::large_enum_variant, reason = "there is one at a time, on the stack of the caller")]
enum KernelWork {
    /// It exchanges blocks with the ranks of the node.
    Blocks(Blocks),
    /// It runs the items of a plan.
    List,
    /// It moves messages between pairs of ranks.
    Transfers,
}

/// How long a worker waits for the next captured call after it has carried the messages of one.
const LINGER: Duration = Duration::from_micros(200);

/// How long a caller sleeps at a time while there is no place for its list or the table of its transfers.
const FULL_WAIT: Duration = Duration::from_micros(50);

/// Distinguishes what kernels run from what hosts run by the same plan: they cut it into other messages.
const BY_KERNEL: u64 = 1 << 63;

/// The words of a call that all ranks must have equal; the last one is free.
fn words_of(call: &Call) -> [u64; CALL_WORDS] {
    let [_, kinds, count, program, _] = call.to_words();
    // Blocks that differ in length are known to two ranks each, which compare them.
    let count = if call.collective == Collective::AllToAllV { 0 } else { count };
    [kinds, count, program, 0]
}

/// What a rank of `world` moves in a group of sends and receives, or in an all-to-all.
fn transfers_of(checked: &CheckedCall, me: Rank, world: usize) -> Vec<VectorTransfer> {
    let moved = |is_send, peer, piece, dtype| match is_send {
        true => VectorTransfer::Send(peer, piece, dtype),
        false => VectorTransfer::Receive(peer, piece, dtype),
    };
    if let Some(messages) = &checked.messages {
        let others = messages.iter().filter(|message| message.peer != me);
        let others = others.map(|message| moved(message.is_send, message.peer, message.piece, message.dtype));
        let own = |is_send| {
            let own = messages.iter().filter(move |message| message.peer == me && message.is_send == is_send);
            own.map(|message| message.piece)
        };
        return others
            .chain(own(true).zip(own(false)).map(|(from, into)| VectorTransfer::Copy(from, into)))
            .collect();
    }
    let Some(blocks) = &checked.blocks else { return Vec::new() };
    let (mut transfers, mut sent, mut received) = (Vec::with_capacity(2 * world), 0, 0);
    for peer in 0..world {
        let (send, receive) = match blocks {
            BlockCounts::Equal(count) => (*count, *count),
            BlockCounts::Listed(counts) => counts[peer],
        };
        let [send, receive] = [send, receive].map(|count| count as usize * checked.dtype.size());
        let (from, into) = (checked.input.narrow(sent, send), checked.output.narrow(received, receive));
        if peer == me {
            transfers.push(VectorTransfer::Copy(from, into));
        } else {
            transfers.push(moved(true, peer, from, checked.dtype));
            transfers.push(moved(false, peer, into, checked.dtype));
        }
        (sent, received) = (sent + send, received + receive);
    }
    transfers
}

/// Has the kernel access vectors that lie in registered memory, if those of all ranks do.
///
/// # Errors
/// `System` if the GPU fails.
fn set_places(checked: &CheckedCall, blocks: &mut Blocks, calls: &KernelState) -> Result<()> {
    let Some(registered) = calls.registered.as_ref().filter(|registered| registered.has_any()) else {
        return Ok(());
    };
    registered.use_opened()?;
    if !blocks.is_long() {
        return Ok(());
    }
    let CheckedCall { collective, input, output, in_place, .. } = *checked;
    let is_exchanged_in_place = collective == Collective::AllToAll && in_place;
    let placed = blocks.set_places(output.as_ptr(), is_exchanged_in_place, |vector| {
        registered.place_of(match vector {
            Vector::Input => input,
            Vector::Output => output,
        })
    });
    placed.unwrap_or_else(|why| registered.note_stages(why));
    Ok(())
}

fn described_to_kernel(checked: &CheckedCall, runner: &CallRunner, words: [u64; CALL_WORDS]) -> BlockCall {
    let rank = runner.kernel_node().iter().position(|rank| *rank == runner.rank);
    BlockCall {
        collective: checked.collective,
        root: checked.root,
        rank: rank.unwrap_or(0),
        world: runner.world,
        dtype: checked.dtype,
        count: checked.count,
        arithmetic: checked.arithmetic(),
        average: checked.averages(),
        factor: checked.prescales().then_some(checked.op.factor()),
        words,
    }
}
