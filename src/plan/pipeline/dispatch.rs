//! The pipeline's decisions: the next action that is possible now.
//!
//! Owns the order in which pending work is tried. Must not know how events change the state.

use super::Pipeline;
use super::action::{Action, Location};
use super::link_state::{PendingRecv, PendingSend};
use crate::plan::Rank;
use crate::plan::program::{Body, OperandSource, StepId};
use std::ops::Range;
use std::sync::Arc;

impl Pipeline {
    /// The next action for the executor; `None` if nothing is possible before the next event.
    pub fn next_action(&mut self) -> Option<Action> {
        // Releases and messages come first: they keep peers and links busy while this rank adds.
        if let Some(peer) = self.to_release.pop_front() {
            return Some(Action::Release { peer });
        }
        while let Some(&peer) = self.to_send.front() {
            if let Some(action) = self.try_send(peer) {
                return Some(action);
            }
            self.to_send.pop_front();
            self.link(peer).send_queued = false;
        }
        while let Some(&peer) = self.to_post_recv.front() {
            if let Some(action) = self.try_post_recv(peer) {
                return Some(action);
            }
            self.to_post_recv.pop_front();
            self.link(peer).recv_queued = false;
        }
        while let Some(&step) = self.to_combine.front() {
            if let Some(action) = self.try_combine(step) {
                return Some(action);
            }
            self.to_combine.pop_front();
            self.progress.unqueue(step);
        }
        None
    }

    fn try_send(&mut self, peer: Rank) -> Option<Action> {
        loop {
            let link = self.links.get_mut(peer)?;
            if link.send_posted < link.planned {
                let outgoing = *link.outgoing.get(link.send_posted);
                if outgoing.ready {
                    link.send_posted += 1;
                    let Body::Send { buffer, .. } = &*self.program.steps[outgoing.step as usize].body else {
                        unreachable!("only sends are planned");
                    };
                    let location = outgoing.slot.map_or(Location::Buffer(*buffer), Location::Slot);
                    return Some(Action::Send { peer, location, step: outgoing.step, sub: outgoing.sub });
                }
            }
            let (step, sub) = link.sends.get(link.planned)?;
            if !self.dependencies_met(step, sub) {
                return None;
            }
            if self.needs_staging(peer, step) {
                return self.try_stage(step, sub);
            }
            let link = self.link(peer);
            if link.is_full() {
                return None;
            }
            link.plan_send(PendingSend { step, sub, ready: true, slot: None });
        }
    }

    /// Stages a sub-chunk once for all peers that need it staged. Waits until every one of them can send it next, so
    /// that only messages in flight hold a slot.
    fn try_stage(&mut self, step: StepId, sub: u64) -> Option<Action> {
        let mut users = 0;
        for peer in self.peers_of(step) {
            if !self.needs_staging(*peer, step) {
                continue;
            }
            let link = self.links.get(*peer)?;
            let head = link.sends.get(link.planned);
            if head != Some((step, sub)) || link.is_full() || link.send_slots_held >= link.profile.send_slots
            {
                return None;
            }
            users += 1;
        }
        let slot = self.free.pop().expect("the pool has a slot for every link's share");
        self.slot_users[slot as usize] = users;
        let program = Arc::clone(&self.program);
        let Body::Send { buffer, peers } = &*program.steps[step as usize].body else {
            unreachable!("only sends are staged");
        };
        for peer in peers {
            if self.needs_staging(*peer, step) {
                let link = self.link(*peer);
                link.send_slots_held += 1;
                link.plan_send(PendingSend { step, sub, ready: false, slot: Some(slot) });
                self.queue_send(*peer);
            }
        }
        Some(Action::Stage { step, sub, buffer: *buffer, slot })
    }

    fn try_post_recv(&mut self, peer: Rank) -> Option<Action> {
        let link = self.links.get(peer)?;
        let (step, sub) = link.receives.get(link.recv_posted)?;
        if link.recv_posted - link.released >= link.profile.window as u64 {
            return None;
        }
        let slot = if self.program.steps[step as usize].is_copy() && !link.staging.recv {
            if !self.dependencies_met(step, sub) {
                return None;
            }
            None
        } else {
            if link.recv_slots_held >= link.profile.recv_slots {
                return None;
            }
            Some(self.free.pop().expect("the pool has a slot for every link's share"))
        };
        let link = self.links.get_mut(peer)?;
        link.recv_slots_held += usize::from(slot.is_some());
        link.incoming.set(link.recv_posted, PendingRecv { slot, consumed: false });
        link.recv_posted += 1;
        let into = self.program.steps[step as usize].destination();
        let location = slot.map_or(Location::Buffer(into), Location::Slot);
        Some(Action::PostRecv { peer, location, step, sub })
    }

    fn try_combine(&mut self, step: StepId) -> Option<Action> {
        let subs = self.place(step).subs;
        let issued = self.progress.issued(step, subs);
        if issued >= subs {
            return None;
        }
        let sub = issued.into();
        let Body::Combine { operands, .. } = &*self.program.steps[step as usize].body else {
            return None;
        };
        for (part, operand) in operands.iter().enumerate() {
            let OperandSource::Received { peer } = *operand else {
                continue;
            };
            let link = self.links.get(peer)?;
            let direct = !link.profile.reads_in_place && !link.staging.recv;
            if direct && self.program.steps[step as usize].is_copy() {
                // The message is received at its destination: no device is needed.
                return None;
            }
            if self.recv_message_of(peer, step, part as u32, sub) >= link.recv_completed {
                return None;
            }
        }
        if !self.dependencies_met(step, sub) {
            return None;
        }
        self.progress.issue(step);
        Some(Action::Combine { step, sub })
    }

    /// Whether every earlier step is done with the elements of this sub-chunk.
    fn dependencies_met(&self, step: StepId, sub: u64) -> bool {
        let Range { end, .. } = self.elements(step, sub);
        self.program.dependencies(step).iter().all(|dependency| {
            if dependency.in_place_only && !self.binding.in_place {
                return true;
            }
            let bound = self.place(dependency.on);
            // Steps process elements in ascending order, so everything below the watermark is done.
            end <= bound.start || self.watermark(dependency.on) >= end.min(bound.end)
        })
    }

    /// The element below which a step is done.
    fn watermark(&self, step: StepId) -> u64 {
        let bound = self.place(step);
        let done = if self.bound.is_send(step) == Some(true) {
            let completed = |(part, peer): (u32, &Rank)| {
                let link = self.links.get(*peer).expect("a send's links exist");
                link.completed(self.program.link_entry(step, part))
            };
            (0..).zip(self.peers_of(step)).map(completed).min().unwrap_or(bound.subs)
        } else {
            self.progress.done(step, bound.subs)
        };
        match done {
            0 => bound.start,
            _ => (bound.origin + (bound.first + u64::from(done)) * self.binding.subchunk).min(bound.end),
        }
    }
}
