//! One connection of a rank to a process that may be its coordinator.
//!
//! Owns what each of its messages means to the rank.

use super::call_state::CallState;
use super::framed_stream::FramedStream;
use super::handshake::Applicant;
use super::protocol::{
    FRAME_LIMIT, HelloHeader, HelloParams, Nonce, OPENING_LIMIT, ToCoordinator, ToRank, decode, encode,
};
use super::secret::JobSecret;
use super::world_status::WorldStatus;
use crate::error::{Error, Result};
use crate::peer_text::PeerText;
use crate::rank::Rank;
use crate::tls::{INTERCEPTOR, TlsRole};
use rustix::event::PollFd;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long a coordinator may take for each step of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why an attempt failed.
pub(super) enum ConnectError {
    /// A later attempt may succeed.
    Retry(String),
    /// No process answers, possibly because of the network. A later attempt may succeed.
    Unreachable(String),
    /// The coordinator that answered does not admit this rank.
    Refused(Error),
    /// Later attempts cannot succeed.
    Fatal(Error),
}

/// What a coordinator answers a caller that it admits.
pub(super) enum CoordinatorAnswer {
    /// All ranks have joined. The description of the coordinator's process, and its ranks.
    Welcome { host: PeerText, ranks: Vec<Rank> },
    /// All ranks have joined, and must join again at these addresses.
    Moved(Vec<SocketAddr>),
    /// The state of the world.
    Status(WorldStatus),
}

/// The outcome of an attempt.
pub(super) type Attempt<T> = std::result::Result<T, ConnectError>;

/// One connection of a rank that is joining.
pub(super) struct JoinAttempt<'a> {
    rank: Rank,
    params: &'a HelloParams,
    /// When the rank gives up the rendezvous.
    deadline: Instant,
    /// Until when a coordinator that has proved itself may take for its answer.
    patience: Instant,
    applicant: Applicant<'a>,
    connection: FramedStream,
    /// The coordinator's challenge, until it is answered.
    challenge: Option<Nonce>,
    /// Whether the coordinator has proved that it belongs to the job.
    is_acknowledged: bool,
    until: Instant,
}

impl<'a> JoinAttempt<'a> {
    /// Begins a handshake on a connection, as a rank of the job with this number. The rank gives up at
    /// `deadline`, and waits until `patience` for a coordinator that has proved itself.
    ///
    /// # Errors
    /// `System` if there are no random numbers.
    pub(super) fn new(
        mut connection: FramedStream,
        secret: &'a JobSecret,
        job: u128,
        header: &HelloHeader,
        params: &'a HelloParams,
        [deadline, patience]: [Instant; 2],
    ) -> Result<Self> {
        let (applicant, opening) = Applicant::new(secret, job, header)?;
        connection.enqueue(opening);
        if secret.is_encrypted() {
            connection.require_encryption(TlsRole::Initiator, OPENING_LIMIT);
        }
        let until = (Instant::now() + HANDSHAKE_TIMEOUT).min(patience);
        Ok(Self {
            rank: header.rank,
            params,
            deadline,
            patience,
            applicant,
            connection,
            challenge: None,
            is_acknowledged: false,
            until,
        })
    }

    /// Waits for the first answer no longer than this.
    pub(super) fn limit_silence(&mut self, longest: Duration) {
        self.until = self.until.min(Instant::now() + longest.min(HANDSHAKE_TIMEOUT));
    }

    /// Whether the coordinator has proved that it belongs to the job. It then also knows this rank.
    pub(super) fn is_acknowledged(&self) -> bool {
        self.is_acknowledged
    }

    /// Until when to wait for the next message.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// What to poll for.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.connection, self.connection.poll_flags())
    }

    /// The connection, for use after the answer.
    pub(super) fn into_connection(self) -> FramedStream {
        self.connection
    }

    /// Ends the attempt, and tells the coordinator why if it may know this rank by now: the end of the
    /// connection says less.
    pub(super) fn give_up(mut self, error: &Error) {
        if self.applicant.has_proved() {
            report_failure(&mut self.connection, error);
        }
    }

    /// Sends and receives once. Returns the coordinator's answer, if it has arrived, or why the connection
    /// has ended: a verb phrase. Sets `number` to the number of the attempt that the coordinator serves, as
    /// soon as it is known.
    pub(super) fn advance(
        &mut self,
        number: &mut Option<u64>,
    ) -> Attempt<(Option<CoordinatorAnswer>, Option<String>)> {
        let broken = self.connection.flush().err().map(|cause| format!("broke ({cause})"));
        // What the coordinator has sent before says more than the end of the connection.
        let received = self.connection.receive(FRAME_LIMIT);
        let mut frames = received.frames.into_iter();
        while let Some(frame) = frames.next() {
            if let Some(answer) = self.on_frame(&frame, number)? {
                // The world may have failed right after it was complete.
                self.connection.put_back(frames);
                return Ok((Some(answer), None));
            }
        }
        self.prove_once_bound().map_err(|error| ConnectError::Retry(error.message().to_owned()))?;
        Ok((None, received.end.or(broken)))
    }

    /// Handles a frame of the process that listens there. Returns its answer, if this is it.
    fn on_frame(&mut self, frame: &[u8], number: &mut Option<u64>) -> Attempt<Option<CoordinatorAnswer>> {
        match (decode::<ToRank>(frame), self.is_acknowledged) {
            (Some(ToRank::Challenge(nonce)), false) => {
                // Whatever a process sends that has not proved itself, the rank tries again.
                let retry = |cause: &str| ConnectError::Retry(cause.to_owned());
                if self.challenge.is_some() || self.applicant.has_proved() {
                    return Err(retry("the process that listens there sent two challenges"));
                }
                self.challenge = Some(nonce);
                if self.applicant.is_encrypted() {
                    self.connection.encrypt().map_err(|error| retry(error.message()))?;
                }
            }
            (Some(ToRank::HelloAck(code)), false) => {
                if !self.applicant.is_proof(&code) {
                    let interceptor = if self.applicant.is_encrypted() { INTERCEPTOR } else { "" };
                    let cause =
                        format!("the process that listens there does not know the job's secret{interceptor}");
                    return Err(ConnectError::Retry(cause));
                }
                self.connection.trust();
                self.is_acknowledged = true;
                self.until = self.patience;
            }
            (Some(ToRank::Refused(error)), false) => return Err(ConnectError::Refused(error)),
            (Some(ToRank::Attempt(attempt)), true) => *number = Some(attempt),
            (Some(ToRank::Welcome { host, ranks }), true) => {
                return Ok(Some(CoordinatorAnswer::Welcome { host, ranks }));
            }
            (Some(ToRank::Moved(addresses)), true) => return Ok(Some(CoordinatorAnswer::Moved(addresses))),
            (Some(ToRank::Status(status)), true) => return Ok(Some(CoordinatorAnswer::Status(status))),
            (Some(ToRank::Notice(text)), true) => log::warn!("rank {}: {text}", self.rank),
            (Some(ToRank::TryAgain(why)), true) => return Err(ConnectError::Retry(why.into())),
            (Some(ToRank::RootCause(error)), true) => return Err(ConnectError::Fatal(error)),
            _ => {
                let cause = "the process that listens there is not a flexring coordinator";
                return Err(ConnectError::Retry(cause.to_owned()));
            }
        }
        Ok(None)
    }

    /// Answers the challenge once the connection has its binding: at once, or after the handshake of its
    /// encryption.
    fn prove_once_bound(&mut self) -> Result<()> {
        let Some(binding) = self.connection.binding().map(<[u8]>::to_vec) else {
            return Ok(());
        };
        let Some(nonce) = self.challenge.take() else {
            return Ok(());
        };
        let left = self.deadline.saturating_duration_since(Instant::now());
        let params = HelloParams { join_timeout: left, ..self.params.clone() };
        let proof = self.applicant.prove(nonce, &binding, &params)?;
        self.connection.enqueue(proof);
        // From now on the coordinator may know this rank, so closing the connection could fail the
        // rendezvous. A coordinator that was stopped for a while gets the full time for its answer.
        self.until = (Instant::now() + HANDSHAKE_TIMEOUT).min(self.patience);
        Ok(())
    }
}

/// Reports why a rank that the coordinator knows cannot be part of the world.
pub(super) fn report_failure(connection: &mut FramedStream, error: &Error) {
    let state = CallState::Idle { finished: 0 };
    if let Ok(frame) = encode(&ToCoordinator::Report { error: error.clone(), suspect: None, state }) {
        connection.enqueue(frame);
        // If it cannot be sent, the end of the connection is reported.
        let _ = connection.flush();
    }
}

/// A rank that gets answers, for fuzzing.
#[cfg(test)]
pub(super) struct AnsweredRank {
    secret: JobSecret,
    header: HelloHeader,
    params: HelloParams,
}

#[cfg(test)]
impl AnsweredRank {
    pub(super) fn new(header: HelloHeader, params: HelloParams) -> Self {
        let source = super::secret::SecretSource::of_settings(&crate::config::Config::default(), 7);
        let secret = source.expect("valid").secret().expect("none is needed");
        Self { secret, header, params }
    }

    /// Handles frames until one ends the attempt. `is_acknowledged` if the coordinator has proved itself
    /// before.
    pub(super) fn receive(
        &self,
        connection: FramedStream,
        is_acknowledged: bool,
        frames: impl Iterator<Item = Vec<u8>>,
    ) {
        let until = [Instant::now() + HANDSHAKE_TIMEOUT; 2];
        let attempt = JoinAttempt::new(connection, &self.secret, 7, &self.header, &self.params, until);
        let mut attempt = attempt.expect("random bytes");
        attempt.is_acknowledged = is_acknowledged;
        let mut number = None;
        for frame in frames {
            if !matches!(attempt.on_frame(&frame, &mut number), Ok(None))
                || attempt.prove_once_bound().is_err()
            {
                return;
            }
        }
    }
}
