//! One world of a control connection, as the connection's thread serves it.
//!
//! Owns which call state the coordinator has, whether the rank is leaving, and what the end of the connection
//! means to the world.

use super::call_state::CallState;
use super::control_state::Shared;
use super::process::Process;
use super::process_exit::ProcessExit;
use crate::error::Error;
use crate::peer_text::PeerText;
use std::sync::Arc;
use std::time::Instant;

/// A world that the thread serves.
pub(super) struct WorldClient {
    pub(super) shared: Arc<Shared>,
    /// Description of the coordinator's process.
    host_process: PeerText,
    /// Whether all ranks have opened the world.
    pub(super) is_open: bool,
    /// The last known call state of this rank.
    state: CallState,
    /// The version of the call state that the coordinator has.
    sent: u64,
    /// Whether the coordinator announced that it may close the connection.
    pub(super) is_closing: bool,
    /// The process that causes the failure of the next message, and whether it ends.
    failing: Option<(Process, bool)>,
    /// That of the coordinator, if it may close the connection.
    closing: Option<(Process, bool)>,
    /// The failure of the world, and the process whose end comes first.
    held: Option<(Error, ProcessExit)>,
    /// Until when to wait for the answer to the goodbye, after which this rank sends no more.
    pub(super) leaving: Option<Instant>,
}

impl WorldClient {
    /// The world that the connection was made for. `host_process` describes the coordinator's process.
    pub(super) fn first(shared: Arc<Shared>, host_process: PeerText) -> Self {
        let state = CallState::Idle { finished: 0 };
        Self {
            shared,
            host_process,
            is_open: true,
            state,
            sent: 0,
            is_closing: false,
            failing: None,
            closing: None,
            held: None,
            leaving: None,
        }
    }

    /// A subworld, which not all ranks have opened yet.
    pub(super) fn further(shared: Arc<Shared>, host_process: PeerText) -> Self {
        Self { is_open: false, ..Self::first(shared, host_process) }
    }

    /// All ranks have opened the world. `host_process` describes the coordinator's process.
    pub(super) fn on_opened(&mut self, host_process: PeerText) {
        if !self.is_open {
            self.is_open = true;
            self.host_process = host_process;
            self.shared.change(|state| state.is_open = true);
        }
    }

    /// Whether messages can be sent: the world is open, and this rank is not leaving.
    pub(super) fn is_active(&self) -> bool {
        self.is_open && self.leaving.is_none()
    }

    /// Whether the coordinator has an old call state.
    pub(super) fn has_changed(&self) -> bool {
        self.shared.call_state.version() != self.sent
    }

    /// The call state of this rank, or the last known one if the executor changes it during the read. The
    /// caller sends it.
    pub(super) fn state(&mut self) -> CallState {
        if let Some((version, state)) = self.shared.call_state.read_versioned() {
            self.sent = version;
            self.state = state;
        }
        self.state
    }

    /// The next message concerns a failure that this process causes.
    pub(super) fn on_await_exit(&mut self, process: Process, ends: bool) {
        self.failing = Some((process, ends));
    }

    /// The coordinator may close the connection from now on.
    pub(super) fn on_closing(&mut self) {
        self.is_closing = true;
        self.closing = self.failing.take();
    }

    /// The world has failed.
    pub(super) fn on_root_cause(&mut self, error: Error) {
        let process = self.failing.take();
        self.fail_after_exit(process, error);
    }

    /// Fails once this process has ended, if that is to be waited for.
    fn fail_after_exit(&mut self, process: Option<(Process, bool)>, error: Error) {
        match process.and_then(|(process, ends)| ProcessExit::of(&process, ends, Instant::now())) {
            Some(exit) if self.leaving.is_none() => {
                self.held.get_or_insert((error, exit));
                self.shared.change(|state| state.is_held = true);
            }
            _ => self.fail(error),
        }
    }

    /// Whether the world has failed, but this rank does not show it yet.
    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Shows a failure whose time has come.
    pub(super) fn show_failure(&mut self, now: Instant) {
        let leaves = self.leaving.is_some();
        if let Some((error, _)) = self.held.take_if(|(_, exit)| leaves || exit.is_over(now)) {
            self.fail(error);
        }
    }

    /// The world fails now.
    pub(super) fn fail(&self, error: Error) {
        // Raise the fault first: threads that wait for the shared state check the fault next.
        self.shared.fault.raise(error.clone());
        self.shared.change(|state| {
            state.root_cause.get_or_insert(error);
        });
    }

    /// The coordinator is gone, and with it the process it ran in.
    pub(super) fn on_coordinator_lost(&mut self, cause: &str) {
        if self.is_held() || self.shared.state().root_cause.is_some() {
            return;
        }
        let activity = match self.state() {
            CallState::InCall(call) => format!("while this rank was in {call}"),
            CallState::Idle { .. } => "while this rank was in no call".to_owned(),
        };
        let message =
            format!("{} is gone: the control connection to it {cause} {activity}", self.host_process);
        self.fail(Error::peer_lost(message));
    }

    /// The coordinator's process has ended after it had announced that. A call that this rank is in, and that
    /// another rank has left without, fails now: the coordinator did not hear of it.
    pub(super) fn on_coordinator_closed(&mut self) {
        if !self.is_held()
            && let CallState::InCall(call) = self.state()
            && let Err(error) = self.shared.departure.check(self.shared.rank, &call)
        {
            let process = self.closing.take();
            self.fail_after_exit(process, error);
        }
    }

    /// This rank has left the world, or the thread ends.
    pub(super) fn end(&self) {
        self.shared.connection.forget(self.shared.world);
        self.shared.change(|state| state.ended = true);
    }
}
