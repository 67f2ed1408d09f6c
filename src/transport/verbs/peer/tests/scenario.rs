//! Scenarios of the simulation: which calls two ranks make, with which messages, and which faults occur.

use crate::transport::fixtures::random_bytes;
use crate::transport::verbs::objects::Shim;
use fastrand::Rng;

/// Bytes of the longest message.
pub(super) const LONGEST: usize = 20 << 10;

/// One scenario. Equal seeds give equal scenarios.
pub(super) struct Scenario {
    pub seed: u64,
    /// By queue pair: the rail of rank 0 and of rank 1.
    pub rails: Vec<(usize, usize)>,
    pub calls: Vec<ScenarioCall>,
    /// How many ends of queue pairs break spontaneously.
    pub breaks: usize,
    /// Index of a queue pair that is never selected to break spontaneously; `None`: any may break.
    pub unbroken: Option<usize>,
    /// Bytes of the longest eager message.
    pub longest_eager: usize,
    /// By rank: the longest message that is written together with its immediate data; `None`: all are.
    pub split_above: [Option<usize>; 2],
    /// By rank: the verbs that fail.
    pub shims: [Shim; 2],
    /// The rank whose devices do not flush broken queue pairs, if there is one.
    pub stuck: Option<usize>,
    /// Whether broken queue pairs are connected again.
    pub reconnects: bool,
    /// Whether ranks poll after each action, and then do nothing for long.
    pub stepwise: bool,
}

/// One call of both ranks.
pub(super) struct ScenarioCall {
    /// Whether the call uses this link.
    pub uses_link: bool,
    /// Lengths of the messages, by the rank that sends them.
    pub lens: [Vec<usize>; 2],
}

impl Scenario {
    /// The scenario of a seed, with up to this many breaks.
    pub(super) fn new(seed: u64, breaks: usize) -> Self {
        let mut random = Rng::with_seed(seed);
        let qps = 1 + random.usize(..4);
        let (mine, theirs) = (1 + random.usize(..qps), 1 + random.usize(..qps));
        let calls = 1 + random.usize(..4);
        let longest_eager = [0, 100, 4096, 16 << 10][random.usize(..4)];
        Self {
            seed,
            longest_eager,
            rails: (0..qps).map(|qp| (qp % mine, qp % theirs)).collect(),
            calls: (0..calls).map(|_| ScenarioCall::random(&mut random, longest_eager)).collect(),
            breaks: if breaks == 0 { 0 } else { random.usize(..breaks + 1) },
            unbroken: (random.usize(..4) != 0).then(|| random.usize(..qps)),
            // Each rank decides for itself.
            split_above: [(); 2].map(|()| [None, Some(0), Some(8 << 10)][random.usize(..3)]),
            shims: [Shim::none(), Shim::none()],
            stuck: None,
            reconnects: false,
            stepwise: false,
        }
    }
}

impl ScenarioCall {
    fn random(random: &mut Rng, longest_eager: usize) -> Self {
        let lens = |random: &mut Rng| {
            let most = [1, 3, 8, 100][random.usize(..4)];
            (0..random.usize(..most + 1)).map(|_| message_len(random, longest_eager)).collect()
        };
        Self { uses_link: random.usize(..6) != 0, lens: [lens(random), lens(random)] }
    }
}

fn message_len(random: &mut Rng, longest_eager: usize) -> usize {
    match random.usize(..8) {
        0..=3 => 1 + random.usize(..64),
        4 | 5 => (longest_eager + random.usize(..5)).saturating_sub(2).max(1),
        6 => 1 + random.usize(..longest_eager + 1),
        _ => 1 + random.usize(..LONGEST),
    }
}

/// The bytes of a message, unique to it.
pub(super) fn content(seed: u64, from: usize, sequence: u64, number: usize, len: usize) -> Vec<u8> {
    let seed = seed ^ (from as u64) << 60 ^ sequence << 40 ^ (number as u64) << 20;
    random_bytes(&mut Rng::with_seed(seed), len)
}
