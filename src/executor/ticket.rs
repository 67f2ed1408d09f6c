//! Tickets: the numbers under which devices report finished jobs.

use crate::plan::program::StepId;

/// In timelines, the ticket of a job that runs outside a program, of which there is one at a time. No packed
/// ticket is this number.
pub(super) const OUTSIDE_JOB: u64 = u64::MAX;

/// What a job in flight is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub step: StepId,
    /// The step's sub-chunk, less than 2^30.
    pub sub: u64,
    /// Whether the job copies to a slot.
    pub stages: bool,
    /// Whether the job reads views of peers' memory.
    pub reads_views: bool,
}

impl Ticket {
    /// As a number: step, sub-chunk, and one bit for each flag.
    pub(super) fn pack(self) -> u64 {
        u64::from(self.step) << 32 | self.sub << 2 | u64::from(self.reads_views) << 1 | u64::from(self.stages)
    }

    /// From a number that [`pack`](Self::pack) made.
    pub(super) fn unpack(packed: u64) -> Self {
        let (step, sub) = ((packed >> 32) as StepId, (packed & 0xffff_ffff) >> 2);
        Self { step, sub, stages: packed & 1 == 1, reads_views: packed & 2 == 2 }
    }
}

#[cfg(test)]
mod tests {
    use super::Ticket;

    #[test]
    fn a_ticket_survives_packing() {
        for (stages, reads_views) in [(false, false), (true, false), (false, true), (true, true)] {
            let ticket = Ticket { step: u32::MAX, sub: (1 << 30) - 1, stages, reads_views };
            assert_eq!(Ticket::unpack(ticket.pack()), ticket);
        }
    }
}
