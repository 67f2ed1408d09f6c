//! Which ports of a rank's rails work, as far as the devices tell.
//!
//! Owns how often devices are asked. Must not know links.

use crate::transport::verbs::link_batch::RailDevice;
use crate::transport::verbs::wire::MAX_RAILS;
use std::time::{Duration, Instant};

/// How often devices are asked for the states of their ports.
const INTERVAL: Duration = Duration::from_millis(100);

/// By rail: the state of its port.
#[derive(Debug, Default)]
pub(super) struct PortStates {
    asked: Option<Instant>,
    is_down: [bool; MAX_RAILS],
    /// Whether its device failed or was removed.
    has_failed: [bool; MAX_RAILS],
}

impl PortStates {
    /// Asks the devices, unless that was done a short while ago.
    pub(super) fn refresh(&mut self, devices: &[RailDevice], now: Instant) {
        if self.asked.is_some_and(|asked| now.duration_since(asked) < INTERVAL) {
            return;
        }
        self.asked = Some(now);
        for (device, is_down) in devices.iter().zip(&mut self.is_down) {
            *is_down = !device.context.port(device.port).is_ok_and(|port| port.active);
        }
    }

    /// A port went down, or came up.
    pub(super) fn set_down(&mut self, rail: usize, is_down: bool) {
        self.is_down[rail] = is_down;
    }

    /// A device does not work any more.
    pub(super) fn set_failed(&mut self, rail: usize) {
        self.has_failed[rail] = true;
    }

    /// Whether the device of a rail does not work any more.
    pub(super) fn has_failed(&self, rail: usize) -> bool {
        self.has_failed[rail]
    }

    /// Whether the port of a rail works.
    pub(super) fn works(&self, rail: usize) -> bool {
        !self.is_down[rail] && !self.has_failed[rail]
    }
}
