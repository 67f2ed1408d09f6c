//! What can be done now: decided anew whenever something may have become possible.

use super::link::{Incoming, Outgoing};
use super::{Action, Pipeline, Place};
use crate::plan::Rank;
use crate::plan::program::{Body, Operand, Source, StepId};
use std::ops::Range;
use std::sync::Arc;

impl Pipeline {
    /// The next thing to do, if there is anything to do now.
    pub fn next_action(&mut self) -> Option<Action> {
        // Releases and messages first: they keep peers and wires busy while this rank adds.
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
        while let Some(&peer) = self.to_land.front() {
            if let Some(action) = self.try_land(peer) {
                return Some(action);
            }
            self.to_land.pop_front();
            self.link(peer).land_queued = false;
        }
        while let Some(&step) = self.to_combine.front() {
            if let Some(action) = self.try_combine(step) {
                return Some(action);
            }
            self.to_combine.pop_front();
            self.exec_queued[step as usize] = false;
        }
        None
    }

    fn try_send(&mut self, peer: Rank) -> Option<Action> {
        loop {
            let link = self.links[peer].as_mut()?;
            if link.posted < link.planned {
                let outgoing = *link.outgoing.get(link.posted);
                if outgoing.ready {
                    link.posted += 1;
                    let Body::Send { source, .. } = &self.program.steps[outgoing.step as usize].body else {
                        unreachable!("only sends are planned");
                    };
                    let place = outgoing.slot.map_or(Place::Vector(*source), Place::Slot);
                    return Some(Action::Send { peer, place, step: outgoing.step, sub: outgoing.sub });
                }
            }
            let (step, sub) = link.sends.at(link.planned)?;
            if !self.may_touch(step, sub) {
                return None;
            }
            if self.needs_staging(peer, step) {
                return self.try_stage(step, sub);
            }
            let link = self.link(peer);
            if link.is_full() {
                return None;
            }
            link.plan_send(Outgoing { step, sub, ready: true, slot: None });
        }
    }

    /// Stages a sub-chunk once for all peers that need it staged. All of them must be ready for it, so that a
    /// slot is only held by messages that are on their way.
    fn try_stage(&mut self, step: StepId, sub: u64) -> Option<Action> {
        let mut users = 0;
        for peer in self.peers_of(step) {
            if !self.needs_staging(*peer, step) {
                continue;
            }
            let link = self.links[*peer].as_ref()?;
            let head = link.sends.at(link.planned);
            if head != Some((step, sub)) || link.is_full() || link.send_slots_held >= link.profile.send_slots
            {
                return None;
            }
            users += 1;
        }
        let slot = self.free.pop().expect("slots suffice for all that links may hold");
        self.slot_users[slot as usize] = users;
        let program = Arc::clone(&self.program);
        let Body::Send { source, peers } = &program.steps[step as usize].body else {
            unreachable!("only sends are staged");
        };
        for peer in peers {
            if self.needs_staging(*peer, step) {
                let link = self.link(*peer);
                link.send_slots_held += 1;
                link.plan_send(Outgoing { step, sub, ready: false, slot: Some(slot) });
                self.queue_send(*peer);
            }
        }
        Some(Action::Stage { step, sub, source: *source, slot })
    }

    fn try_land(&mut self, peer: Rank) -> Option<Action> {
        let link = self.links[peer].as_ref()?;
        let (step, sub) = link.receives.at(link.landing)?;
        if link.landing - link.released >= link.profile.window as u64 {
            return None;
        }
        let slot = if self.program.steps[step as usize].is_copy() && !link.staging.landing {
            if !self.may_touch(step, sub) {
                return None;
            }
            None
        } else {
            if link.land_slots_held >= link.profile.land_slots {
                return None;
            }
            Some(self.free.pop().expect("slots suffice for all that links may hold"))
        };
        let link = self.links[peer].as_mut()?;
        link.land_slots_held += usize::from(slot.is_some());
        link.incoming.set(link.landing, Incoming { slot, consumed: false });
        link.landing += 1;
        let place = slot.map_or(Place::Vector(Source::Output), Place::Slot);
        Some(Action::Land { peer, place, step, sub })
    }

    fn try_combine(&mut self, step: StepId) -> Option<Action> {
        let sub = self.steps[step as usize].issued;
        if sub >= self.steps[step as usize].subs {
            return None;
        }
        let Body::Combine { operands, .. } = &self.program.steps[step as usize].body else {
            return None;
        };
        for (part, operand) in operands.iter().enumerate() {
            let Operand::From { peer } = *operand else {
                continue;
            };
            let link = self.links[peer].as_ref()?;
            let lands = !link.profile.in_place && !link.staging.landing;
            if lands && self.program.steps[step as usize].is_copy() {
                // It lands where it belongs and needs no device.
                return None;
            }
            if self.message_of(peer, step, part as u32, sub) >= link.arrived {
                return None;
            }
        }
        if !self.may_touch(step, sub) {
            return None;
        }
        self.steps[step as usize].issued += 1;
        Some(Action::Combine { step, sub })
    }

    /// Whether all that the sub-chunk waits for is done.
    fn may_touch(&self, step: StepId, sub: u64) -> bool {
        let Range { end, .. } = self.elements(step, sub);
        self.program.dependencies(step).iter().all(|dependency| {
            if dependency.in_place_only && !self.binding.in_place {
                return true;
            }
            let bound = &self.steps[dependency.on as usize];
            // Steps go upwards, so all below the watermark is done; nothing above `end` matters.
            end <= bound.start || self.watermark(dependency.on) >= end.min(bound.end)
        })
    }

    /// The element up to which a step is done.
    fn watermark(&self, step: StepId) -> u64 {
        let bound = &self.steps[step as usize];
        let done = match &self.program.steps[step as usize].body {
            Body::Combine { .. } => bound.done,
            Body::Send { peers, .. } => {
                let over = |(part, peer): (u32, &Rank)| {
                    self.links[*peer].as_ref().expect("a send's links exist").sends.over(step, part)
                };
                (0..).zip(peers).map(over).min().unwrap_or(bound.subs)
            }
        };
        match done {
            0 => bound.start,
            _ => (bound.origin + (bound.first + done) * self.binding.subchunk).min(bound.end),
        }
    }
}
