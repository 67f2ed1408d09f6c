//! Two ranks that exchange the messages of several calls over the simulated fabric, and what must hold meanwhile.

use super::super::{Boards, Invitation, Peer};
use super::fabric::{Fabric, RETRIED};
use super::plan::{LONGEST, Plan, content};
use crate::error::{Error, ErrorKind};
use crate::memory::Piece;
use crate::transport::fixtures::{Random, call, piece};
use crate::transport::verbs::board::Board;
use crate::transport::verbs::link::{Link, RECEIVES, SENDS};
use crate::transport::verbs::objects::{
    CompletionQueue, Context, Depth, Endpoint, PathAttributes, ProtectionDomain, QueuePair, WriteRequest,
};
use crate::transport::verbs::regions::{Region, Regions};
use crate::transport::verbs::wire::{Layout, RAILS, WINDOW, Word};
use crate::transport::{Event, Events};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

/// Steps after which a world that has not ended never will.
const ENDLESS: usize = 400_000;

/// What came of it.
pub(super) struct Outcome {
    /// By rank.
    pub failed: [Option<Error>; 2],
    /// How many writes have waited on one queue pair at most.
    pub waited: usize,
}

fn bytes_of(piece: Piece) -> &'static [u8] {
    // SAFETY: worlds keep their memory to their end; what this returns is compared at once.
    unsafe { std::slice::from_raw_parts(piece.as_ptr(), piece.len()) }
}

fn scribble(piece: Piece) {
    // SAFETY: the piece is the rank's own memory, which nobody else may touch any more.
    unsafe { std::ptr::write_bytes(piece.as_ptr(), 0xee, piece.len()) };
}

/// One message's landing that is open: which message, and where.
struct Landing {
    message: u64,
    place: Piece,
}

/// One rank's part in one call.
#[derive(Default)]
struct Exchange {
    sources: VecDeque<Piece>,
    posted: usize,
    landings: VecDeque<Landing>,
    landed: usize,
    called: bool,
}

struct Rank {
    peer: Peer,
    regions: Regions,
    inbox: Piece,
    /// Where messages can land, used again as soon as possible.
    free: Vec<Piece>,
    /// Calls that are over, and the one that is under way.
    done: usize,
    exchange: Option<Exchange>,
    held: Vec<Weak<Region>>,
    leaving: bool,
    /// Whether it has destroyed its queue pairs.
    gone: bool,
    failed: Option<Error>,
    /// Whether it looks at all at the moment.
    awake: bool,
    /// Kept for what points into it.
    memory: Vec<Vec<u8>>,
}

pub(super) struct World {
    plan: Plan,
    random: Random,
    fabric: Fabric,
    ranks: [Rank; 2],
    breaks: usize,
}

impl Rank {
    fn new(me: usize, plan: &Plan, boards: &[Piece; 2], memory: Vec<Vec<u8>>) -> Self {
        let rails: Vec<_> =
            plan.rails.iter().map(|rails| if me == 0 { *rails } else { (rails.1, rails.0) }).collect();
        let count = 1 + rails.iter().map(|(mine, _)| *mine).max().unwrap_or(0);
        let pds: Vec<_> = (0..count)
            .map(|rail| {
                let context = Context::inert(&format!("inert{rail}"), plan.shims[me].clone());
                ProtectionDomain::new(&context).expect("inert")
            })
            .collect();
        let queues: Vec<_> =
            pds.iter().map(|pd| CompletionQueue::new(pd.context(), 1).expect("inert")).collect();
        let registration = crate::config::Registration::Subchunk;
        let regions = Regions::new(pds.clone(), false, registration, 4096).expect("inert");
        let layout = Layout { pairs: rails.len() };
        let mut memory = memory;
        memory.push(vec![0; layout.bytes()]);
        let outbox = piece(memory.last_mut().expect("just pushed"));
        memory.push(vec![0; LONGEST * (WINDOW + 4)]);
        let landings = piece(memory.last_mut().expect("just pushed"));
        let board = Board::new(boards[me], outbox, layout);
        let depth = Depth { sends: SENDS as u32 + 1, receives: RECEIVES as u32, inline: 0 };
        let fresh = rails.iter().map(|(mine, _)| {
            let pair = QueuePair::new(&pds[*mine], &queues[*mine], depth, (1, 0), 1 - me, 1);
            (pair.expect("inert"), ROUTE)
        });
        let theirs = Invitation {
            endpoints: vec![Endpoint { qpn: 1, psn: 1 }; rails.len()],
            address: boards[1 - me].as_ptr() as u64,
            keys: [7; RAILS],
        };
        let link = Link::new(1 - me, board, &rails);
        let boards_of = Boards {
            inboxes: regions.own(boards[me], true).expect("inert"),
            outboxes: regions.own(outbox, false).expect("inert"),
            _memory: memmap2::MmapMut::map_anon(1).expect("a page"),
        };
        let peer =
            Peer::connect(0, link, board, &Arc::new(boards_of), fresh.collect(), &theirs).expect("inert");
        Self {
            peer,
            regions,
            inbox: boards[me],
            free: (0..WINDOW + 4).map(|at| landings.narrow(at * LONGEST, LONGEST)).collect(),
            done: 0,
            exchange: None,
            held: Vec::new(),
            leaving: false,
            gone: false,
            failed: None,
            awake: true,
            memory,
        }
    }

    /// Panics unless the peer may write this now.
    fn allow(&self, request: &WriteRequest) {
        let (from, len) = (request.to, request.len as usize);
        let inbox = self.inbox.as_ptr() as u64;
        assert_eq!(request.rkey, 7, "the key of a rail that this rank has");
        if (inbox..inbox + self.inbox.len() as u64).contains(&from) {
            assert!(from + len as u64 <= inbox + self.inbox.len() as u64, "within the inbox");
            return;
        }
        let landing = self.exchange.iter().flat_map(|exchange| &exchange.landings).find(|landing| {
            (landing.place.as_ptr() as u64, landing.place.len()) == (from, len)
                && request.immediate.is_some_and(|word| Word::unpack(word).0 == Word::Data(landing.message))
        });
        assert!(landing.is_some(), "{request:?} is written where no landing of its message is open");
    }
}

const ROUTE: PathAttributes = PathAttributes {
    port: 1,
    gid_index: 0,
    gid: [0; 16],
    lid: 0,
    global: true,
    mtu: 3,
    service_level: 0,
    traffic_class: 0,
    timeout: 0,
    retries: 0,
};

impl World {
    pub(super) fn new(plan: Plan) -> Self {
        let layout = Layout { pairs: plan.rails.len() };
        let mut inboxes = [vec![0; layout.bytes()], vec![0; layout.bytes()]];
        let boards = inboxes.each_mut().map(|inbox| piece(inbox));
        let [one, other] = inboxes;
        let mut fabric = Fabric::new(&plan.rails);
        let mut random = Random(!plan.seed);
        let mut ranks = [Rank::new(0, &plan, &boards, vec![one]), Rank::new(1, &plan, &boards, vec![other])];
        for (me, rank) in ranks.iter_mut().enumerate() {
            for pair in 0..plan.rails.len() {
                let hello = rank.peer.link.hello(pair).expect("alive");
                rank.peer.post_now(&hello).expect("alive");
            }
            obey(&mut fabric, me, rank, &mut random);
        }
        Self { breaks: plan.breaks, plan, random, fabric, ranks }
    }

    /// One rank's end, for who plays the device himself.
    pub(super) fn peer(&mut self, me: usize) -> &mut Peer {
        &mut self.ranks[me].peer
    }

    /// Lets happen what may, one thing after the other, until both ranks have left or failed.
    pub(super) fn run(mut self) -> Outcome {
        for _ in 0..ENDLESS {
            for me in 0..2 {
                if !self.ranks[me].gone && self.is_over(me) {
                    self.ranks[me].gone = true;
                    self.fabric.destroy(me, &mut self.random);
                }
            }
            if self.ranks.iter().all(|rank| rank.gone) {
                return self.close();
            }
            if self.random.once_in(if self.plan.fussy { 3_000 } else { 80 }) {
                // Somebody computes for a while, or sleeps.
                self.ranks.iter_mut().for_each(|rank| rank.awake = !self.random.once_in(3));
            }
            let (me, pair) = (self.random.below(2), self.random.below(self.plan.rails.len()));
            match self.random.below(12) {
                0..=3 => self.fabric.deliver(me, pair, |request| self.ranks[1 - me].allow(request)),
                4..=6 => self.fabric.acknowledge(me, pair),
                7 if self.random.once_in(8) => self.fabric.miss(me, pair, &mut self.random),
                7 if self.breaks > 0 && self.plan.spared != Some(pair) && self.random.once_in(16) => {
                    self.breaks -= 1;
                    self.fabric.break_end(me, pair, RETRIED, &mut self.random);
                }
                8 | 9 if self.ranks[me].awake => {
                    self.act(me);
                    if self.plan.fussy {
                        self.look(me);
                    }
                }
                10 | 11 if self.ranks[me].awake => self.look(me),
                _ => {}
            }
        }
        let told = |rank: &Rank| format!("{} calls done, {:?}", rank.done, rank.peer.link);
        panic!("this never ends\nrank 0: {}\nrank 1: {}", told(&self.ranks[0]), told(&self.ranks[1]));
    }

    fn is_over(&self, me: usize) -> bool {
        let rank = &self.ranks[me];
        let link = &rank.peer.link;
        rank.failed.is_some()
            || (rank.leaving && (!self.fabric.connects() || (link.is_flushed() && link.has_left())))
    }

    fn close(self) -> Outcome {
        let failed = self.ranks.map(|rank| {
            let Rank { peer, held, failed, memory, .. } = rank;
            // A link that was given up holds what it held until it is destroyed.
            let living = failed.is_none().then_some(peer);
            let held = held.iter().filter(|region| region.upgrade().is_some()).count();
            assert_eq!(held, 0, "regions are held for nothing");
            drop(living);
            assert!(memory.len() > 2, "memory is kept to the end");
            failed
        });
        Outcome { failed, waited: self.fabric.waited }
    }

    /// What a rank does by itself: begin the next call, send, or open a landing.
    fn act(&mut self, me: usize) {
        let Self { plan, random, ranks, .. } = self;
        let rank = &mut ranks[me];
        if rank.gone || rank.leaving {
            return;
        }
        let sequence = rank.done as u64 + 1;
        let Some(planned) = plan.calls.get(rank.done) else {
            rank.peer.link.bye();
            rank.leaving = true;
            return;
        };
        let Some(exchange) = &mut rank.exchange else {
            if random.once_in(4) {
                assert!(!rank.peer.link.is_busy(), "nothing is under way between calls");
                rank.peer.link.begin(sequence);
                rank.exchange = Some(Exchange::default());
                if planned.goes_here
                    && let Err(error) = rank.peer.link.announce(&call(sequence))
                {
                    self.fail(me, error);
                }
            }
            return;
        };
        if !planned.goes_here {
            // This rank has done what it had to do elsewhere.
            if random.once_in(4) {
                (rank.exchange, rank.done) = (None, rank.done + 1);
            }
            return;
        }
        let (sends, lands) = (&planned.lens[me], &planned.lens[1 - me]);
        let mut outcome = Ok(());
        for _ in 0..if plan.fussy { 1 } else { 1 + random.below(5) } {
            if random.once_in(2) {
                if exchange.posted < sends.len() && exchange.sources.len() < WINDOW {
                    let len = sends[exchange.posted];
                    rank.memory.push(content(plan.seed, me, sequence, exchange.posted, len));
                    let source = piece(rank.memory.last_mut().expect("just pushed"));
                    let eager = rank.peer.link.sends_eagerly(len);
                    let region = (!eager).then(|| rank.regions.for_sending(source).expect("inert"));
                    rank.held.extend(region.as_ref().map(Arc::downgrade));
                    outcome = outcome.and(rank.peer.link.send(source, region));
                    exchange.sources.push_back(source);
                    exchange.posted += 1;
                }
            } else {
                let message = exchange.landed + exchange.landings.len();
                if message < lands.len() && exchange.landings.len() < WINDOW {
                    let len = lands[message];
                    let place = rank.free.pop().expect("more places than landings").narrow(0, len);
                    let eager = rank.peer.link.lands_eagerly(len);
                    let region = (!eager).then(|| rank.regions.for_landing(place));
                    rank.held.extend(region.as_ref().map(Arc::downgrade));
                    let keys = region.as_ref().map_or([0; RAILS], |region| region.rkeys().expect("inert"));
                    exchange.landings.push_back(Landing { message: message as u64, place });
                    outcome = outcome.and(rank.peer.link.land(place, region, keys));
                }
            }
        }
        if let Err(error) = outcome {
            self.fail(me, error);
        }
    }

    /// A rank looks at what was completed, posts what is due, and hears what happened.
    fn look(&mut self, me: usize) {
        let Self { random, fabric, ranks, .. } = self;
        let rank = &mut ranks[me];
        // Between calls nobody looks.
        if rank.gone || !(rank.leaving || rank.exchange.is_some()) {
            return;
        }
        let mut events = Events::new();
        let mut outcome = Ok(());
        for rail in 0..fabric.rails(me) {
            // When the peer has left nothing takes long to show any more.
            let all = rank.peer.link.has_left() || random.once_in(2);
            let most = if all { usize::MAX } else { random.below(40) };
            for _ in 0..most {
                let Some(completion) = fabric.completion(me, rail) else { break };
                outcome = outcome.and_then(|()| rank.peer.completed(&completion));
                obey(fabric, me, rank, random);
            }
        }
        if random.once_in(8) {
            for pair in 0..rank.peer.connections() {
                if let Ok(Some(probe)) = rank.peer.link.probe(pair) {
                    outcome = outcome.and_then(|()| rank.peer.post_now(&probe));
                }
            }
        }
        let outcome = outcome.and_then(|()| rank.peer.step(&mut events).map(drop));
        obey(fabric, me, rank, random);
        events.into_iter().for_each(|event| self.hear(me, event));
        if let Err(error) = outcome {
            self.fail(me, error);
        }
        let rank = &mut self.ranks[me];
        let Some(planned) = self.plan.calls.get(rank.done) else { return };
        let done = rank.exchange.as_ref().is_some_and(|exchange| {
            let sent = exchange.posted == planned.lens[me].len() && exchange.sources.is_empty();
            exchange.called && sent && exchange.landed == planned.lens[1 - me].len()
        });
        if done && rank.failed.is_none() {
            (rank.exchange, rank.done) = (None, rank.done + 1);
            rank.held.retain(|region| region.upgrade().is_some());
            assert!(rank.held.is_empty(), "a region is held after the call");
        }
    }

    fn hear(&mut self, me: usize, event: Event) {
        let rank = &mut self.ranks[me];
        let sequence = rank.done as u64 + 1;
        let exchange = rank.exchange.as_mut().expect("events are heard within a call");
        match event {
            Event::PeerEntered { peer, call: theirs } => {
                assert_eq!((peer, theirs), (1 - me, call(sequence)));
                assert!(!std::mem::replace(&mut exchange.called, true), "called once");
            }
            Event::SendComplete { .. } => {
                let source = exchange.sources.pop_front().expect("sent after it was posted");
                let start = source.as_ptr() as u64;
                let read = self.fabric.reads(me, &(start..start + source.len() as u64));
                assert!(!read, "what was sent is still to be read");
                scribble(source);
            }
            Event::RecvComplete { .. } => {
                assert!(exchange.called, "the call comes first");
                let landing = exchange.landings.pop_front().expect("landed after it was opened");
                let len = landing.place.len();
                let expected = content(self.plan.seed, 1 - me, sequence, exchange.landed, len);
                assert!(bytes_of(landing.place) == expected, "message {} is another", landing.message);
                exchange.landed += 1;
                scribble(landing.place);
                // SAFETY: the place was cut from one as long as the longest message.
                rank.free.push(unsafe {
                    Piece::new(NonNull::new(landing.place.as_ptr()).expect("memory"), LONGEST)
                });
            }
            Event::RecvReady { .. } => panic!("nothing is delivered in place"),
        }
    }

    /// A rank's call has failed. That may only be if no connection is left, or if a device refuses.
    fn fail(&mut self, me: usize, error: Error) {
        let refused = self.plan.shims[me].triggered() && error.message().contains("ibv_");
        assert!(refused || !self.fabric.connects(), "rank {me} fails though a connection is left: {error}");
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(error.message().starts_with(&format!("rank {} ", 1 - me)), "{error}");
        let rank = &mut self.ranks[me];
        rank.peer.give_up(&error);
        rank.failed = Some(error);
        rank.exchange = None;
    }
}

/// Has the fabric do what a rank's queue pairs were told.
fn obey(fabric: &mut Fabric, me: usize, rank: &mut Rank, random: &mut Random) {
    for (number, pair) in rank.peer.pairs.iter_mut().enumerate() {
        fabric.obey(me, number, pair.recorded_calls(), random);
    }
}
