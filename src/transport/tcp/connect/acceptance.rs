//! The side of a link that accepts: connections from the ranks that this one awaits, and from strangers.
//!
//! Owns the steps of accepted connections.

use super::{
    ConnectState, Connector, PendingSocket, advice, differing_sockets, lacks_descriptors, set_options,
};
use crate::descriptor;
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::secret::random_bytes;
use crate::tls::TlsRole;
use crate::transport::tcp::handshake::{self, HELLO, LinkHello};
use crate::transport::tcp::socket::LinkSocket;
use crate::transport::tcp::unauthenticated::{HandshakeBuffer, Stage, Unauthenticated};
use std::io::{self, ErrorKind as Io};
use std::time::{Duration, Instant};

/// How long an accepted connection may take for its handshake. The hello of a rank comes with its first
/// packet.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections accepted per listener before others are served again.
const ACCEPT_BATCH: usize = 64;

/// How long the listeners are ignored after the process ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long the process may lack descriptors without a pause before that is an error.
const ACCEPT_PATIENCE: Duration = Duration::from_millis(1500);

impl Connector {
    /// Accepts connections that wait at a listener.
    pub(super) fn accept(&mut self, index: usize) -> Result<()> {
        for _ in 0..ACCEPT_BATCH {
            let (socket, address) = match descriptor::accept_tcp(&self.listener.sockets[index]) {
                Ok(accepted) => accepted,
                Err(cause) if cause.kind() == Io::WouldBlock => return Ok(()),
                Err(cause) if lacks_descriptors(&cause) => return self.lack_descriptors(index, cause),
                // The failure of one connection does not affect the others.
                Err(cause) => {
                    log::debug!("tcp: a connection was lost before it was accepted: {cause}");
                    continue;
                }
            };
            self.lacking_since = None;
            if let Err(cause) = socket.set_nonblocking(true) {
                log::debug!("tcp: a connection from {address} cannot be used: {cause}");
                continue;
            }
            if self.unauthenticated.len() >= self.max_unauthenticated {
                // The oldest one is the least likely to be a rank.
                self.unauthenticated.pop_front();
            }
            let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
            let stage = Stage::Hello(HandshakeBuffer::EMPTY);
            reach(FaultPoint::TcpAccepted);
            let socket = LinkSocket::new(socket);
            self.unauthenticated.push_back(Unauthenticated { socket, address, stage, deadline });
        }
        Ok(())
    }

    /// Waits a moment for another part of the process to close descriptors. An error if none does for long.
    fn lack_descriptors(&mut self, index: usize, cause: io::Error) -> Result<()> {
        let now = Instant::now();
        let since = *self.lacking_since.get_or_insert(now);
        if now - since >= ACCEPT_PATIENCE {
            let endpoint = self.listener.endpoints[index];
            let context = format!("cannot accept connections at {endpoint} ({})", advice(&cause));
            return Err(Error::io(context, cause));
        }
        self.unauthenticated.pop_front();
        self.accept_resumes = Some(now + ACCEPT_PAUSE);
        Ok(())
    }

    /// Continues the handshake of an accepted connection. Once it is complete, establishes the connection.
    /// Drops the connection if it is not from an expected rank.
    pub(super) fn authenticate(&mut self, index: usize) -> Result<()> {
        let Some(connection) = self.unauthenticated.get_mut(index) else {
            return Ok(());
        };
        let outcome = match &mut connection.stage {
            Stage::Hello(buffer) => match buffer.read(&mut connection.socket) {
                Ok(None) => return Ok(()),
                Ok(Some(hello)) => match self.on_hello(index, hello)? {
                    true => return Ok(()),
                    false => None,
                },
                Err(_) => None,
            },
            Stage::Encryption(hello) => {
                let hello = *hello;
                match self.answer(index, hello)? {
                    true => return Ok(()),
                    false => None,
                }
            }
            Stage::Proof { hello, challenge, proof } => match proof.read(&mut connection.socket) {
                Ok(None) => return Ok(()),
                Ok(Some(proof)) => Some((*hello, *challenge, proof)),
                Err(_) => None,
            },
        };
        let Some(Unauthenticated { mut socket, address, .. }) = self.unauthenticated.remove(index) else {
            return Ok(());
        };
        let proved = outcome.and_then(|(hello, challenge, proof)| {
            let at = self.expected(&hello)?;
            let key = &self.pending[at].key;
            let is_proved = handshake::verify_proof(key, &hello, &challenge, socket.binding(), &proof);
            is_proved.then_some((at, LinkHello::from_bytes(&hello)?))
        });
        let Some((at, hello)) = proved else {
            log::debug!("tcp: dropped a connection from {address}, which is not from a rank of this job");
            return Ok(());
        };
        if hello.sockets != self.sockets {
            return Err(differing_sockets(self.me, self.sockets, hello.from, hello.sockets));
        }
        let matches =
            |pending: &&mut PendingSocket| pending.peer == hello.from && pending.socket == hello.socket;
        if let Some(pending) = self.pending[at..].iter_mut().find(matches) {
            reach(FaultPoint::TcpEstablished);
            socket.trust();
            match socket.send(&handshake::ACCEPTED) {
                // A peer that connects twice has lost its first connection.
                Ok(()) => pending.state = ConnectState::Established(set_options(socket)?),
                // The peer will connect again.
                Err(cause) => pending.cause = cause.to_string(),
            }
        }
        Ok(())
    }

    /// Begins to encrypt the connection with this hello if the job is encrypted, and sends the challenge.
    /// `false` as for [`answer`](Self::answer).
    fn on_hello(&mut self, index: usize, hello: [u8; HELLO]) -> Result<bool> {
        if self.expected(&hello).is_none() {
            return Ok(false);
        }
        let connection = &mut self.unauthenticated[index];
        if self.is_encrypted {
            connection.socket.encrypt(TlsRole::Acceptor)?;
        }
        connection.stage = Stage::Encryption(hello);
        self.answer(index, hello)
    }

    /// Sends the challenge that answers a hello, once the encryption has begun. `false` if the hello is not
    /// from an expected rank, or if the connection is lost: the peer will connect again.
    fn answer(&mut self, index: usize, hello: [u8; HELLO]) -> Result<bool> {
        let Some(at) = self.expected(&hello) else {
            return Ok(false);
        };
        let Unauthenticated { socket, stage, .. } = &mut self.unauthenticated[index];
        match socket.advance() {
            Ok(true) => {}
            Ok(false) => return Ok(true),
            Err(_) => return Ok(false),
        }
        let key = &self.pending[at].key;
        let challenge = handshake::challenge(key, &hello, self.sockets, random_bytes()?, socket.binding());
        *stage = Stage::Proof { hello, challenge, proof: HandshakeBuffer::EMPTY };
        Ok(socket.send(&challenge).is_ok())
    }

    /// Index of the first socket of the peer that this hello claims to be from; `None` if it is from no
    /// expected rank.
    fn expected(&self, hello: &[u8; HELLO]) -> Option<usize> {
        let LinkHello { from, to, encrypted, .. } = LinkHello::from_bytes(hello)?;
        // All ranks of a world have compared this setting.
        let is_expected = to == self.me && from > self.me && encrypted == self.is_encrypted;
        self.pending.iter().position(|pending| is_expected && pending.peer == from)
    }
}
