//! Notices that travel on connections of their own.
//!
//! Owns these connections until their notices are sent. A rank may be stopped while the encryption of its
//! connection begins: what is sent there waits for its answer. The kernel of its host accepts a new
//! connection all the same, and keeps the notice.

use super::message::ShrinkNotice;
use super::session::Session;
use crate::error::Result;
use crate::rank::Rank;
use crate::transport::tcp::{check_connected, start_connecting};
use rustix::event::{PollFd, PollFlags};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How long sending a notice may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// A notice that is not sent yet.
#[derive(Debug)]
struct UnsentNotice {
    rank: Rank,
    notice: ShrinkNotice,
    /// When it is given up.
    until: Instant,
    connection: NoticeConnection,
}

#[derive(Debug)]
enum NoticeConnection {
    /// The kernel is connecting.
    Connecting(TcpStream),
    /// The notice is queued.
    Sending(Box<Session>),
}

/// All notices that are not sent yet.
#[derive(Debug, Default)]
pub(super) struct Notices {
    unsent: Vec<UnsentNotice>,
}

impl Notices {
    /// Whether all notices are sent or given up.
    pub(super) fn is_empty(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Begins to send `notice` to `rank`, which listens at `endpoint`.
    pub(super) fn send(&mut self, rank: Rank, endpoint: SocketAddr, notice: ShrinkNotice, now: Instant) {
        match start_connecting(endpoint) {
            Ok(stream) => {
                let connection = NoticeConnection::Connecting(stream);
                self.unsent.push(UnsentNotice { rank, notice, until: now + PATIENCE, connection });
            }
            Err(cause) => log::debug!("cannot send rank {rank} the notice of a shrink: {cause}"),
        }
    }

    /// What to poll for.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.unsent.iter().map(|unsent| match &unsent.connection {
            NoticeConnection::Connecting(stream) => PollFd::new(stream, PollFlags::OUT),
            NoticeConnection::Sending(session) => PollFd::new(&**session, PollFlags::OUT),
        })
    }

    /// When the next notice is given up.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.unsent.iter().map(|unsent| unsent.until).min()
    }

    /// Continues to send. `ready` says, in the order of [`poll_fds`](Self::poll_fds), which connections are
    /// ready. `open` makes a session of a connection to a rank.
    pub(super) fn advance(
        &mut self,
        ready: &[bool],
        now: Instant,
        open: impl Fn(TcpStream, Rank) -> Result<Session>,
    ) {
        let mut ready = ready.iter();
        for unsent in std::mem::take(&mut self.unsent) {
            let is_ready = ready.next().is_some_and(|ready| *ready);
            let rank = unsent.rank;
            match if is_ready { unsent.advance(&open) } else { Ok(Some(unsent)) } {
                Ok(Some(unsent)) if now < unsent.until => self.unsent.push(unsent),
                Ok(Some(_)) => log::debug!("cannot send rank {rank} the notice of a shrink: no answer"),
                Ok(None) => {}
                Err(why) => log::debug!("cannot send rank {rank} the notice of a shrink: {why}"),
            }
        }
    }
}

impl UnsentNotice {
    /// Continues to send once the connection is ready. `None` if the notice is sent.
    fn advance(
        mut self,
        open: impl Fn(TcpStream, Rank) -> Result<Session>,
    ) -> std::result::Result<Option<Self>, String> {
        let mut session = match self.connection {
            NoticeConnection::Connecting(stream) => {
                check_connected(&stream).map_err(|cause| cause.to_string())?;
                let mut session = open(stream, self.rank).map(Box::new).map_err(|error| error.to_string())?;
                session.send_notice(&self.notice).map_err(|error| error.to_string())?;
                session
            }
            NoticeConnection::Sending(session) => session,
        };
        session.flush().map_err(|cause| cause.to_string())?;
        if !session.has_unsent() {
            return Ok(None);
        }
        self.connection = NoticeConnection::Sending(session);
        Ok(Some(self))
    }
}

#[cfg(test)]
mod tests {
    use super::super::listener::ShrinkListener;
    use super::super::message::CallsMade;
    use super::super::service::{ShrinkService, ShrinkServiceParams};
    use super::super::session::SessionParams;
    use super::super::unidentified::{Routing, UnidentifiedConnections};
    use super::*;
    use crate::config::{Config, Switch};
    use crate::secret::SecretKey;
    use std::io::ErrorKind;
    use std::net::{IpAddr, Ipv4Addr, TcpListener};
    use std::thread::sleep;

    /// Accepts a connection to rank 1 of 2 within two seconds.
    fn accept(listener: &TcpListener, key: SecretKey) -> Session {
        let params = SessionParams { key, me: 1, world: 2, is_encrypted: true };
        let mut unidentified = UnidentifiedConnections::default();
        let until = Instant::now() + Duration::from_secs(2);
        loop {
            match listener.accept() {
                Ok((stream, _)) => unidentified.add(stream, Instant::now()).expect("a connection"),
                Err(cause) => assert_eq!(cause.kind(), ErrorKind::WouldBlock),
            }
            unidentified.receive(&[true], 4096);
            if let Some((_, connection)) = unidentified.route(Instant::now(), |_| Routing::To(0)).pop() {
                return Session::accept(connection, &params).expect("a session");
            }
            assert!(Instant::now() < until, "no connection comes");
            sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_rank_that_stopped_while_encryption_began_gets_its_notice() {
        let key = || SecretKey::from_parts("test", &[b"notices"]);
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let listener = ShrinkListener::bind(&[ip], None).expect("a port");
        let stopped = TcpListener::bind((ip, 0)).expect("a port");
        stopped.set_nonblocking(true).expect("a socket");
        let endpoints = vec![listener.endpoints().to_vec(), vec![stopped.local_addr().expect("bound")]];
        let config = Config { tls: Switch(true), socket_ifname: Some("=lo".to_owned()), ..Config::default() };
        let params =
            ShrinkServiceParams { me: 0, endpoints, key: key(), listener, ranks_per_core: 0, config };
        let service = ShrinkService::start(params).expect("a thread");
        let calls = CallsMade { finished: 0, has_failed: true };
        let deadline = Instant::now() + Duration::from_secs(20);
        let (members, first) = std::thread::scope(|scope| {
            // Rank 1 answers the opening, and sends nothing after it.
            let first = scope.spawn(|| {
                let mut session = accept(&stopped, key());
                session.flush().expect("a connection");
                session
            });
            let members = service.shrink(Vec::new(), calls, deadline, |world| Ok(world.members.clone()));
            (members.expect("rank 0 goes on"), first.join().expect("a session"))
        });
        assert_eq!(members, [0]);
        // Rank 0 ends before rank 1 continues.
        drop(service);
        let mut second = accept(&stopped, key());
        let mut notices = Vec::new();
        for _ in 0..100 {
            notices.append(&mut second.receive().notices);
            sleep(Duration::from_millis(1));
        }
        assert_eq!(notices, [ShrinkNotice { generation: 0, members: vec![0] }]);
        drop(first);
    }
}
