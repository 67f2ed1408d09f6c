//! Which ports of a rank's rails work, as far as the devices tell.
//!
//! Owns how often devices are asked.

use crate::error::Error;
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
    /// Why its device does not work any more, if it failed or was removed.
    failures: [Option<Error>; MAX_RAILS],
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

    /// A device does not work any more, for this reason. The first one stays.
    pub(super) fn set_failed(&mut self, rail: usize, cause: Error) {
        self.failures[rail].get_or_insert(cause);
    }

    /// By rail: why its device does not work any more.
    pub(super) fn failures(&self) -> &[Option<Error>] {
        &self.failures
    }

    /// Whether the port of a rail works.
    pub(super) fn works(&self, rail: usize) -> bool {
        !self.is_down[rail] && self.failures[rail].is_none()
    }
}
