//! The loop over events: performs the actions of all pipelines and reports what happens to them.
//!
//! Owns the meaning of actions and events in virtual time. Must not decide what moves next: the pipelines do,
//! and each rank performs actions and polls in the order of the executor's program path.

use super::activity::{ActivityId, ActivityKind, Record};
use super::channels::{Channels, RankPeers, WaitingMessage};
use super::event_queue::{ChannelId, EventQueue, SimulatedEvent, VirtualTime};
use super::fair_rates::FlowPath;
use super::flow_weights::flow_weights;
use super::network::Network;
use super::outcome::{LinkUse, SimulatedRun};
use super::parameters::{PICOSECONDS, SimulationInput, SimulationParameters};
use super::rank_state::{Notification, RankJob, RankState};
use super::rank_timeline::RankTimelines;
use flexring_core::error::{Error, Result};
use flexring_plan::Rank;
use flexring_plan::physical_links::PhysicalLinks;
use flexring_plan::pipeline::Action;
use flexring_plan::program::StepId;
use flexring_plan::topology::Topology;

/// Events between two calls of the progress function.
const EVENTS_PER_REPORT: u64 = 1 << 16;

/// All ranks, the network between them, and the time.
pub(super) struct SimulatedWorld<'a> {
    topology: &'a Topology,
    parameters: &'a SimulationParameters,
    now: VirtualTime,
    queue: EventQueue,
    network: Network,
    channels: Channels,
    ranks: Vec<RankState>,
    record: Record,
    /// The peers whose messages a job reads in place.
    read_from: Vec<Rank>,
    /// `None` if they are not recorded.
    timelines: Option<RankTimelines>,
    messages: u64,
    events: u64,
    unfinished: usize,
    /// When the last rank finished, and what it was notified of last.
    finished: VirtualTime,
    last: ActivityId,
}

impl<'a> SimulatedWorld<'a> {
    /// A world of these ranks, each with its peers.
    pub(super) fn new(
        topology: &'a Topology,
        ranks: Vec<RankState>,
        peers: &[RankPeers],
        parameters: &'a SimulationParameters,
        call: SimulationInput,
    ) -> Self {
        let links = PhysicalLinks::new(topology);
        let channels = Channels::new(peers, &links, topology, call.records);
        let weights = match parameters.tcp_in_flight {
            0 => vec![1; channels.len()],
            mean => flow_weights(mean, peers, topology),
        };
        let paths = channels.paths(&links).zip(weights);
        let paths = paths.map(|(links, weight)| FlowPath { links, weight });
        Self {
            timelines: call.timelines.then(|| RankTimelines::new(ranks.len(), channels.len())),
            network: Network::new(&links, paths),
            channels,
            topology,
            parameters,
            now: 0,
            queue: EventQueue::default(),
            unfinished: ranks.len(),
            ranks,
            record: Record::new(call.records),
            read_from: Vec::new(),
            messages: 0,
            events: 0,
            finished: 0,
            last: ActivityId::NONE,
        }
    }

    pub(super) fn run(mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<SimulatedRun> {
        let total: u64 = self.ranks.iter().map(|state| state.pipeline.remaining()).sum();
        for rank in 0..self.ranks.len() {
            self.advance(rank)?;
        }
        self.network.share(self.now, &mut self.queue);
        let mut next_report = EVENTS_PER_REPORT;
        while self.unfinished > 0
            && let Some(time) = self.queue.next_time()
        {
            self.now = time;
            // Rates are computed once for all that happens at this time.
            while let Some(event) = self.queue.pop() {
                self.events += 1;
                self.handle(event)?;
            }
            self.network.share(self.now, &mut self.queue);
            if self.events >= next_report {
                next_report += EVENTS_PER_REPORT;
                progress(
                    total - self.ranks.iter().map(|state| state.pipeline.remaining()).sum::<u64>(),
                    total,
                );
            }
        }
        if self.unfinished > 0 {
            let unfinished = self.unfinished;
            return Err(Error::internal(format!(
                "{unfinished} ranks wait forever in the simulation: please report this"
            )));
        }
        Ok(self.into_run())
    }

    fn into_run(self) -> SimulatedRun {
        let time = self.finished;
        let links = PhysicalLinks::new(self.topology);
        let mut bits = vec![0_u128; 2 * links.len()];
        for (path, carried) in self.channels.paths(&links).zip(self.network.carried()) {
            path.iter().for_each(|link| bits[*link as usize] += u128::from(carried));
        }
        let bandwidths: Vec<[u64; 2]> = links.bandwidths().collect();
        let link_use = |vertex: usize| {
            let mut of_uplink = LinkUse { vertex, up: 0, down: 0, busy: 0.0 };
            for link in links.of(vertex) {
                let carried = [Network::up(link), Network::down(link)].map(|link| bits[link as usize]);
                let [up, down] = carried.map(|bits| (bits / 8) as u64);
                (of_uplink.up, of_uplink.down) = (of_uplink.up + up, of_uplink.down + down);
                for (bits, bandwidth) in
                    carried.into_iter().zip(bandwidths[link]).filter(|(bits, _)| *bits > 0)
                {
                    let possible = bandwidth as f64 * time as f64 / PICOSECONDS as f64;
                    of_uplink.busy = of_uplink.busy.max(bits as f64 / possible);
                }
            }
            of_uplink
        };
        SimulatedRun {
            picoseconds: time,
            links: links.in_output().skip(1).map(link_use).collect(),
            messages: self.messages,
            events: self.events,
            critical_path: self.record.path_to(self.last),
            timeline: self.record.into_activities(),
            ranks: self.timelines.map_or_else(Vec::new, RankTimelines::into_ranks),
        }
    }

    fn handle(&mut self, event: SimulatedEvent) -> Result<()> {
        match event {
            SimulatedEvent::FlowEnds { channel: id, changes } => {
                if !self.network.is_current(id, changes) {
                    return Ok(());
                }
                let channel = self.channels.get(id);
                if !channel.in_place {
                    return self.message_left(id);
                }
                let reader = channel.receiver();
                self.network.end(id);
                if let Some(job) = &mut self.ranks[reader].job {
                    job.reads -= 1;
                }
                self.job_may_end(reader)
            }
            SimulatedEvent::TokensSpent { link, changes } => {
                self.network.tokens_spent(self.now, link, changes);
                Ok(())
            }
            SimulatedEvent::JobEnds { rank } => {
                let rank = rank as Rank;
                if let Some(job) = &mut self.ranks[rank].job {
                    job.thread_works = false;
                }
                self.job_may_end(rank)
            }
            SimulatedEvent::Arrives { channel: id } => {
                let channel = self.channels.get(id);
                let transfer = channel.arrive();
                if self.parameters.completes_on_arrival {
                    self.send_completes(id, transfer)?;
                }
                let channel = self.channels.get(id);
                if channel.posted == 0 {
                    channel.arrive_early(transfer);
                    return Ok(());
                }
                channel.posted -= 1;
                let (peer, from, to) = (channel.sender_name(), channel.sender(), channel.receiver());
                if let Some(timelines) = &mut self.timelines {
                    timelines.receive_ends(id, self.now, (from, to));
                }
                self.notify(to, Notification::RecvComplete { peer }, transfer)
            }
            SimulatedEvent::Announced { channel } => {
                let channel = self.channels.get(channel);
                let cause = channel.arrive();
                let (peer, to) = (channel.sender_name(), channel.receiver());
                self.notify(to, Notification::RecvReady { peer }, cause)
            }
            SimulatedEvent::Released { channel: id } => {
                let channel = self.channels.get(id);
                let cause = channel.released();
                let (peer, from, to) = (channel.receiver_name(), channel.sender(), channel.receiver());
                if let Some(timelines) = &mut self.timelines {
                    timelines.send_ends(id, self.now, (from, to));
                }
                self.notify(from, Notification::SendComplete { peer }, cause)
            }
        }
    }

    /// The last bit of a channel's message was sent.
    fn message_left(&mut self, id: ChannelId) -> Result<()> {
        let now = self.now;
        let channel = self.channels.get(id);
        let (from, to, transfer) = (channel.sender(), channel.receiver(), channel.transfer);
        channel.depart(transfer);
        self.queue.add(now + channel.latency, SimulatedEvent::Arrives { channel: id });
        self.record.end(transfer, now);
        match channel.next_waiting() {
            Some(next) => {
                let kind = ActivityKind::Transfer { from, to };
                channel.transfer = self.record.begin(kind, next.bytes, now, transfer);
                self.network.follow(now, id, next.bytes, &mut self.queue);
            }
            None => {
                channel.is_busy = false;
                self.network.end(id);
            }
        }
        if self.parameters.completes_on_arrival { Ok(()) } else { self.send_completes(id, transfer) }
    }

    /// A message's memory can be overwritten.
    fn send_completes(&mut self, id: ChannelId, transfer: ActivityId) -> Result<()> {
        let channel = self.channels.get(id);
        let (from, to, peer) = (channel.sender(), channel.receiver(), channel.receiver_name());
        if let Some(timelines) = &mut self.timelines {
            timelines.send_ends(id, self.now, (from, to));
        }
        self.notify(from, Notification::SendComplete { peer }, transfer)
    }

    /// Adds to a rank's notifications. An idle rank handles it at once.
    fn notify(&mut self, rank: Rank, notification: Notification, cause: ActivityId) -> Result<()> {
        let state = &mut self.ranks[rank];
        state.receive(notification, cause);
        if state.job.is_some() { Ok(()) } else { self.advance(rank) }
    }

    /// Ends a rank's job if its thread and all its reads are done.
    fn job_may_end(&mut self, rank: Rank) -> Result<()> {
        let state = &mut self.ranks[rank];
        let Some(job) = state.job.take_if(|job| !job.thread_works && job.reads == 0) else {
            return Ok(());
        };
        self.record.end(job.activity, self.now);
        state.cause = job.activity;
        if let Some(timelines) = &mut self.timelines {
            let part = state.part(job.step, job.sub, self.parameters.element_bytes as u64);
            timelines.job(rank, (job.begun, self.now), state.activity(&job), part);
        }
        state.finish(&job).map_err(bug)?;
        if job.is_own_copy {
            self.poll(rank)?;
        }
        self.advance(rank)
    }

    /// Reports a rank's notifications to its pipeline. Whether there were any.
    fn poll(&mut self, rank: Rank) -> Result<bool> {
        let Self { ranks, channels, timelines, .. } = self;
        let (now, element_bytes) = (self.now, self.parameters.element_bytes as u64);
        let readable = |state: &RankState, peer: Rank| {
            if let Some(timelines) = timelines
                && let Some((step, sub)) = state.pipeline.next_recv_part(peer)
            {
                let part = state.part(step, sub, element_bytes);
                timelines.receive_begins(channels.incoming(rank, peer), now, part);
            }
        };
        ranks[rank].poll(readable).map_err(bug)
    }

    /// Performs actions and polls like the executor, until a job takes time or nothing is possible.
    fn advance(&mut self, rank: Rank) -> Result<()> {
        if let Some(timelines) = &mut self.timelines {
            timelines.progressed(rank, self.now);
        }
        loop {
            while let Some(action) = self.ranks[rank].pipeline.next_action() {
                if !self.perform(rank, action)? {
                    return Ok(());
                }
            }
            let state = &mut self.ranks[rank];
            if state.pipeline.is_done() && !std::mem::replace(&mut state.done, true) {
                self.unfinished -= 1;
                (self.finished, self.last) = (self.now, state.cause);
                if let Some(timelines) = &mut self.timelines {
                    timelines.returns(rank, self.now);
                }
            }
            if !self.poll(rank)? {
                if let Some(timelines) = self.timelines.as_mut().filter(|_| !self.ranks[rank].done) {
                    timelines.idle(rank, self.now);
                }
                return Ok(());
            }
        }
    }

    /// Performs one action. Whether the rank's thread is free afterwards.
    fn perform(&mut self, rank: Rank, action: Action) -> Result<bool> {
        let (now, element_bytes) = (self.now, self.parameters.element_bytes as u64);
        let state = &mut self.ranks[rank];
        match action {
            Action::Release { peer } => {
                let cause = state.cause;
                let id = self.channels.incoming(rank, peer);
                let channel = self.channels.get(id);
                if let Some(timelines) = &mut self.timelines {
                    timelines.receive_ends(id, now, (channel.sender(), rank));
                }
                channel.release(cause);
                self.queue.add(now + channel.latency, SimulatedEvent::Released { channel: id });
            }
            Action::Send { peer, step, sub, .. } => {
                let (bytes, cause) = (state.bytes(step, sub, element_bytes), state.cause);
                let id = self.channels.outgoing(rank, peer);
                if let Some(timelines) = &mut self.timelines {
                    timelines.send_begins(id, now, state.part(step, sub, element_bytes));
                }
                self.send(id, WaitingMessage { bytes, cause });
            }
            Action::PostRecv { peer, step, sub, .. } => {
                let id = self.channels.incoming(rank, peer);
                let channel = self.channels.get(id);
                if let Some(timelines) = &mut self.timelines {
                    timelines.receive_begins(id, now, state.part(step, sub, element_bytes));
                }
                match channel.next_early() {
                    Some(transfer) => {
                        if let Some(timelines) = &mut self.timelines {
                            timelines.receive_ends(id, now, (channel.sender(), rank));
                        }
                        state.receive(Notification::RecvComplete { peer }, transfer);
                    }
                    None => channel.posted += 1,
                }
            }
            Action::Stage { step, sub, .. } => {
                let bytes = state.bytes(step, sub, element_bytes);
                self.read_from.clear();
                self.start_job(rank, (step, sub), &action, (bytes, 2 * bytes));
                return Ok(false);
            }
            Action::Combine { step, sub } => {
                self.read_from.clear();
                let in_place = self.parameters.in_place;
                let job = state.combine(step, sub, in_place, element_bytes, &mut self.read_from);
                let Some(job) = job else {
                    state.pipeline.combine_complete(step).map_err(|violation| bug(violation.0))?;
                    return Ok(true);
                };
                self.start_job(rank, (step, sub), &action, (job.bytes, job.moved));
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn send(&mut self, id: ChannelId, message: WaitingMessage) {
        self.messages += 1;
        let now = self.now;
        let channel = self.channels.get(id);
        if channel.in_place {
            // The bytes move when the receiver reads them.
            channel.depart(message.cause);
            self.queue.add(now + channel.latency, SimulatedEvent::Announced { channel: id });
        } else if channel.is_busy {
            channel.wait(message);
        } else {
            let kind = ActivityKind::Transfer { from: channel.sender(), to: channel.receiver() };
            channel.transfer = self.record.begin(kind, message.bytes, now, message.cause);
            channel.is_busy = true;
            self.network.begin(now, id, message.bytes);
        }
    }

    /// Starts a job with bytes of its result and bytes that the thread moves. It reads messages of the peers
    /// in `read_from` in place.
    fn start_job(
        &mut self,
        rank: Rank,
        (step, sub): (StepId, u64),
        action: &Action,
        (bytes, moved): (u64, u64),
    ) {
        let (now, cause) = (self.now, self.ranks[rank].cause);
        for peer in &self.read_from {
            self.network.begin(now, self.channels.incoming(rank, *peer), bytes);
        }
        let state = &mut self.ranks[rank];
        state.job = Some(RankJob {
            step,
            sub,
            stages: matches!(action, Action::Stage { .. }),
            is_own_copy: state.pipeline.is_own_copy(action),
            thread_works: true,
            reads: self.read_from.len(),
            begun: now,
            activity: self.record.begin(ActivityKind::Job { rank }, bytes, now, cause),
        });
        self.queue.job_ends(now + self.parameters.job_time(moved), rank);
    }
}

fn bug(message: String) -> Error {
    Error::internal(format!("{message} in the simulation: please report this"))
}
