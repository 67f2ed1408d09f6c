//! The pipeline's decisions: the next action that is possible now.
//!
//! Owns the order in which pending work is tried.

use super::Pipeline;
use super::action::{Action, Location};
use super::link_state::{LinkNumber, PendingSend};
use crate::program::{Body, DependencyKind, LinkPlace, OperandSource, StepId};
use std::ops::Range;
use std::sync::Arc;

/// Number of operands from which a combine keeps how many of them were received. Those with fewer are as fast
/// to check again.
const MANY_OPERANDS: usize = 3;

impl Pipeline {
    /// The next action for the executor; `None` if nothing is possible before the next event.
    pub fn next_action(&mut self) -> Option<Action> {
        // Releases and messages come first: they keep peers and links busy while this rank adds.
        if let Some(link) = self.to_release.pop_front() {
            return Some(Action::Release { peer: self.links.peer(link) });
        }
        while let Some(&link) = self.to_send.front() {
            if let Some(action) = self.try_send(link) {
                return Some(action);
            }
            self.to_send.pop_front();
            self.links.get_mut(link).1.send_queued = false;
        }
        while let Some(&link) = self.to_post_recv.front() {
            if let Some(action) = self.try_post_recv(link) {
                return Some(action);
            }
            self.to_post_recv.pop_front();
            self.links.get_mut(link).1.recv_queued = false;
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

    fn try_send(&mut self, number: LinkNumber) -> Option<Action> {
        let peer = self.links.peer(number);
        loop {
            let (traffic, link) = self.links.get_mut(number);
            if let Some(PendingSend { step, sub, slot, .. }) = link.post_planned(traffic) {
                let location = slot.map_or_else(|| Location::Buffer(self.source(step)), Location::Slot);
                return Some(Action::Send { peer, location, step, sub: sub.into() });
            }
            let message = traffic.sends.get(link.planned)?;
            let (step, sub) = (message.step, message.sub);
            if !self.dependencies_met(step, sub.into()) {
                return None;
            }
            if self.needs_staging(number, step) {
                return self.try_stage(step, sub);
            }
            let (traffic, link) = self.links.get_mut(number);
            if link.is_full(traffic) {
                return None;
            }
            if link.send_unstaged(traffic, step, sub) {
                let location = Location::Buffer(self.source(step));
                return Some(Action::Send { peer, location, step, sub: sub.into() });
            }
        }
    }

    /// Stages a sub-chunk once for all peers that need it staged. Waits until every one of them can send it
    /// next, so that only messages in flight hold a slot.
    fn try_stage(&mut self, step: StepId, sub: u32) -> Option<Action> {
        let program = Arc::clone(&self.program);
        let links = || program.link_places(step).iter().map(|place| place.link);
        let mut users = 0;
        for number in links() {
            if !self.needs_staging(number, step) {
                continue;
            }
            let (traffic, link) = self.links.get(number);
            let head = traffic.sends.get(link.planned).map(|message| (message.step, message.sub));
            let has_slot = (link.send_slots_held as usize) < traffic.profile.send_slots;
            if head != Some((step, sub)) || link.is_full(traffic) || !has_slot {
                return None;
            }
            users += 1;
        }
        let slot = self.free.pop().expect("the pool has a slot for every link's share");
        self.slot_users[slot as usize] = users;
        for number in links() {
            if self.needs_staging(number, step) {
                let (traffic, link) = self.links.get_mut(number);
                link.send_slots_held += 1;
                link.plan_send(traffic, PendingSend { step, sub, ready: false, slot: Some(slot) });
                self.queue_send(number);
            }
        }
        Some(Action::Stage { step, sub: sub.into(), buffer: self.source(step), slot })
    }

    fn try_post_recv(&mut self, number: LinkNumber) -> Option<Action> {
        let (traffic, link) = self.links.get(number);
        let message = traffic.receives.get(link.recv_posted)?;
        let (step, sub) = (message.step, message.sub.into());
        if link.is_full_of_received(traffic, link.recv_posted) {
            return None;
        }
        let slot = if self.program.steps[step as usize].is_copy() && !link.staging.recv {
            if !self.dependencies_met(step, sub) {
                return None;
            }
            None
        } else {
            if link.recv_slots_held as usize >= traffic.profile.recv_slots {
                return None;
            }
            Some(self.free.pop().expect("the pool has a slot for every link's share"))
        };
        let (traffic, link) = self.links.get_mut(number);
        link.post_recv(traffic, slot);
        let into = self.program.steps[step as usize].destination();
        let location = slot.map_or(Location::Buffer(into), Location::Slot);
        Some(Action::PostRecv { peer: self.links.peer(number), location, step, sub })
    }

    fn try_combine(&mut self, step: StepId) -> Option<Action> {
        let subs = self.place(step).subs;
        let issued = self.progress.issued(step, subs);
        if issued >= subs {
            return None;
        }
        let received = self.progress.received(step)?;
        let Body::Combine { operands, .. } = &*self.program.steps[step as usize].body else {
            return None;
        };
        let places = self.program.link_places(step);
        for (part, operand) in operands.iter().enumerate().skip(received as usize) {
            if matches!(operand, OperandSource::Own { .. }) {
                continue;
            }
            let (traffic, link) = self.links.get(places[part].link);
            let direct = !traffic.profile.reads_in_place && !link.staging.recv;
            if direct && self.program.steps[step as usize].is_copy() {
                // The message is received at its destination: no device is needed.
                return None;
            }
            if traffic.receives.message_of(places[part].entry, issued) >= link.recv_completed.number() {
                if operands.len() >= MANY_OPERANDS {
                    self.progress.wait_for(step, part as u32);
                }
                return None;
            }
        }
        if operands.len() >= MANY_OPERANDS {
            self.progress.all_received(step, operands.len() as u32);
        }
        if !self.dependencies_met(step, issued.into()) {
            return None;
        }
        self.progress.issue(step);
        Some(Action::Combine { step, sub: issued.into() })
    }

    /// Whether every earlier step is done with the elements of this sub-chunk, and every step with those that
    /// were at its place in scratch memory.
    fn dependencies_met(&self, step: StepId, sub: u64) -> bool {
        let dependencies = self.program.dependencies(step);
        if dependencies.is_empty() {
            return true;
        }
        let Range { end, .. } = self.elements(step, sub);
        dependencies.iter().all(|dependency| {
            let bound = self.place(dependency.on);
            let end = match dependency.kind {
                DependencyKind::Elements => end,
                DependencyKind::ElementsInPlace if self.binding.in_place => end,
                DependencyKind::ElementsInPlace => return true,
                DependencyKind::Reuse => {
                    let own = self.place(step);
                    let end_of_cell = own.origin + (own.first + sub + 1) * self.binding.subchunk;
                    end_of_cell.saturating_sub(own.ring)
                }
            };
            // Steps process elements in ascending order, so everything below the watermark is done.
            end <= bound.start || self.watermark(dependency.on) >= end.min(bound.end)
        })
    }

    /// The element below which a step is done.
    fn watermark(&self, step: StepId) -> u64 {
        let bound = self.place(step);
        let done = if self.bound.is_send(step) == Some(true) {
            let completed = |place: &LinkPlace| {
                let (traffic, link) = self.links.get(place.link);
                link.completed(traffic, place.entry)
            };
            self.program.link_places(step).iter().map(completed).min().unwrap_or(bound.subs)
        } else {
            self.progress.done(step, bound.subs)
        };
        match done {
            0 => bound.start,
            _ => (bound.origin + (bound.first + u64::from(done)) * self.binding.subchunk).min(bound.end),
        }
    }
}
