//! What is to happen to two ranks: which calls they make, with which messages, and what goes wrong.

use crate::transport::fixtures::Random;
use crate::transport::verbs::objects::Shim;
use crate::transport::verbs::wire::MAX_EAGER_BYTES;

/// The longest message.
pub(super) const LONGEST: usize = 20 << 10;

/// What is to happen.
pub(super) struct Scenario {
    pub seed: u64,
    /// By pair: the rail of rank 0 and of rank 1.
    pub rails: Vec<(usize, usize)>,
    pub calls: Vec<ScenarioCall>,
    /// How many ends of pairs break by themselves, and a pair of which none does.
    pub breaks: usize,
    pub unbroken: Option<usize>,
    /// What fails at each rank.
    pub shims: [Shim; 2],
    /// Whether ranks do one thing at a time and look at what came of it, and then nothing for long.
    pub stepwise: bool,
}

/// The lengths of one call's messages, by who sends them; a call that does not go over this link has none.
pub(super) struct ScenarioCall {
    pub goes_here: bool,
    pub lens: [Vec<usize>; 2],
}

impl Scenario {
    /// Whatever a seed says.
    pub(super) fn of(seed: u64, breaks: usize) -> Self {
        let mut random = Random(seed);
        let qps = 1 + random.below(4);
        let (mine, theirs) = (1 + random.below(qps), 1 + random.below(qps));
        let calls = 1 + random.below(4);
        Self {
            seed,
            rails: (0..qps).map(|qp| (qp % mine, qp % theirs)).collect(),
            calls: (0..calls).map(|_| ScenarioCall::random(&mut random)).collect(),
            breaks: if breaks == 0 { 0 } else { random.below(breaks + 1) },
            unbroken: (!random.once_in(4)).then(|| random.below(qps)),
            shims: [Shim::none(), Shim::none()],
            stepwise: false,
        }
    }
}

impl ScenarioCall {
    fn random(random: &mut Random) -> Self {
        let lens = |random: &mut Random| {
            let most = [1, 3, 8, 100][random.below(4)];
            (0..random.below(most + 1)).map(|_| message_len(random)).collect()
        };
        Self { goes_here: !random.once_in(6), lens: [lens(random), lens(random)] }
    }
}

fn message_len(random: &mut Random) -> usize {
    match random.below(8) {
        0..=3 => 1 + random.below(64),
        4 | 5 => MAX_EAGER_BYTES - 2 + random.below(5),
        6 => 1 + random.below(MAX_EAGER_BYTES),
        _ => 1 + random.below(LONGEST),
    }
}

/// The bytes of a message: nobody else's are the same.
pub(super) fn content(seed: u64, from: usize, sequence: u64, number: usize, len: usize) -> Vec<u8> {
    Random(seed ^ (from as u64) << 60 ^ sequence << 40 ^ (number as u64) << 20).bytes(len)
}
