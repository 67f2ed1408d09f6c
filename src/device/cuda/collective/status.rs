//! What kernels report to the host, and how the host ends them.
//!
//! Owns the meaning of the words in pinned memory. Calls no function of the driver, because a driver call may
//! wait for the kernel. Must not know what a failure means for a communicator.

use super::layout::{
    CALL_WORDS, MISMATCH, OVERLAP, StatusWords, UNEXPECTED, WAIT_ENTRY, WAIT_HOST, WAIT_RECEIVER, WAIT_SENDER,
};
use crate::rank::Rank;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a kernel left without having completed its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CollectiveFailure {
    /// Another rank makes another call than this one, as the words say.
    Mismatch { rank: usize, epoch: u64, mine: [u64; CALL_WORDS], theirs: [u64; CALL_WORDS] },
    /// A message of this rank is not the one that is expected: their type and length, and the calls that they
    /// lie between.
    Unexpected { rank: Rank, expected: [u64; 2], received: [u64; 2] },
    /// Another kernel of the communicator was running.
    Overlap,
    /// The communicator had ended or failed before, or the host ended the kernel.
    Ended,
}

/// What a kernel has waited for during the last millisecond or longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CollectiveWait {
    /// The number of the call among those that kernels run.
    pub epoch: u64,
    /// The rank that it waits for.
    pub rank: usize,
    /// The slice of the call that waits, or the item of its list.
    pub part: u32,
    pub waited: Waited,
}

/// What a rank is waited for to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// To enter the call. The rank is its place among those of the node.
    Entry,
    /// To receive a message from this rank, or to send it one.
    Receive,
    Send,
    /// To go on with the call.
    Data,
}

impl StatusWords {
    /// The first failure, if a kernel failed.
    pub(super) fn failure(&self) -> Option<CollectiveFailure> {
        let read = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Some(match self.failure.load(Ordering::Acquire) {
            0 => return None,
            MISMATCH => CollectiveFailure::Mismatch {
                rank: read(&self.failed_rank) as usize,
                epoch: read(&self.failed_epoch),
                mine: self.own_words.each_ref().map(read),
                theirs: self.their_words.each_ref().map(read),
            },
            UNEXPECTED => CollectiveFailure::Unexpected {
                rank: read(&self.failed_rank) as usize,
                expected: [0, 1].map(|nth| read(&self.own_words[nth])),
                received: [0, 1].map(|nth| read(&self.their_words[nth])),
            },
            OVERLAP => CollectiveFailure::Overlap,
            _ => CollectiveFailure::Ended,
        })
    }

    /// What a kernel waits for, if it does.
    pub(super) fn waiting(&self) -> Option<CollectiveWait> {
        let epoch = self.waiting_epoch.load(Ordering::Acquire);
        let what = self.waiting_for.load(Ordering::Relaxed);
        let (rank, kind) = ((what & 0xffff) as usize, what >> 16 & 0xffff);
        // The thread that carries messages knows what it waits for itself.
        let is_over = epoch == 0 || kind == WAIT_HOST;
        let waited = match kind {
            WAIT_ENTRY => Waited::Entry,
            WAIT_RECEIVER => Waited::Receive,
            WAIT_SENDER => Waited::Send,
            _ => Waited::Data,
        };
        (!is_over).then_some(CollectiveWait { epoch, rank, part: (what >> 32) as u32, waited })
    }

    /// The last launch that has reported its end.
    pub(super) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// The launch that has started and whose messages the host is to carry; 0 if there is none.
    pub(super) fn started(&self) -> u64 {
        self.started.load(Ordering::Acquire)
    }

    /// Lets the next launch start, as the host begins to carry the messages of the one that has.
    pub(super) fn take_started(&self) {
        self.started.store(0, Ordering::Release);
    }

    /// Not 0 if ranks have accessed each other's vectors in a call.
    pub(super) fn direct(&self) -> u64 {
        self.direct.load(Ordering::Relaxed)
    }

    /// A rank whose vectors had no places in a call in which those of this rank had.
    pub(super) fn unplaced(&self) -> Option<usize> {
        (self.unplaced.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    /// Has all kernels leave, those that run and those that start later.
    pub(super) fn abort(&self) {
        self.host.aborted.store(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cuda::collective::layout::HostWords;

    #[test]
    fn words_say_what_a_kernel_waits_for_and_why_it_failed() {
        let word = AtomicU64::new;
        let status = StatusWords {
            waiting_for: word(7 << 32 | 2 << 16 | 3),
            waiting_epoch: word(0),
            failed_rank: word(5),
            failed_epoch: word(9),
            own_words: [5, 6, 7, 8].map(word),
            their_words: [1, 2, 3, 4].map(word),
            failure: word(0),
            completed: word(0),
            direct: word(0),
            unplaced: word(0),
            started: word(0),
            host: HostWords { aborted: word(0) },
        };
        assert_eq!((status.waiting(), status.failure()), (None, None));
        status.waiting_epoch.store(4, Ordering::Relaxed);
        assert_eq!(
            status.waiting(),
            Some(CollectiveWait { epoch: 4, rank: 3, part: 7, waited: Waited::Data })
        );
        status.failure.store(MISMATCH, Ordering::Relaxed);
        let (mine, theirs) = ([5, 6, 7, 8], [1, 2, 3, 4]);
        assert_eq!(status.failure(), Some(CollectiveFailure::Mismatch { rank: 5, epoch: 9, mine, theirs }));
        status.abort();
        assert_eq!(status.host.aborted.load(Ordering::Relaxed), 1);
    }
}
