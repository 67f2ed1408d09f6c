//! The ports at which this process answers ranks that shrink.
//!
//! Owns their table, the creation of their sockets, and the lifetime of the thread that serves them. All
//! communicators of the process share them.

use super::ports_shared::{PortsShared, ShrinkSocket};
use super::served_rank::ServedRank;
use super::thread::ShrinkThread;
use crate::bootstrap::listen::listen_at;
use crate::config::ListeningPorts;
use crate::error::{Error, Result};
use crate::process::{self, CreatorProcess, PerProcess};
use crate::transport::free_port::listen_at_free_port;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

/// The ports of this process at some addresses. When the last handle is dropped, the thread ends and the
/// sockets close.
#[derive(Debug)]
pub(super) struct ShrinkPorts {
    addresses: Vec<IpAddr>,
    endpoints: Vec<SocketAddr>,
    shared: Arc<PortsShared>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread.
    creator: CreatorProcess,
}

/// Those of this process.
static OPEN: PerProcess<Mutex<Vec<Weak<ShrinkPorts>>>> = PerProcess::new();

impl ShrinkPorts {
    /// The ports at these addresses, which are opened if there are none: in `range`, or where the kernel
    /// chooses.
    ///
    /// # Errors
    /// `System`, naming the address, if one cannot be listened on; also if no descriptor or thread is
    /// available.
    pub(super) fn at(addresses: &[IpAddr], range: Option<ListeningPorts>) -> Result<Arc<Self>> {
        let mut table = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
        table.retain(|ports| ports.strong_count() > 0);
        let is_usable = |ports: &Arc<Self>| ports.addresses == addresses && !ports.shared.has_ended();
        if let Some(ports) = table.iter().filter_map(Weak::upgrade).find(is_usable) {
            return Ok(ports);
        }
        let ports = Arc::new(Self::open(addresses, range)?);
        table.push(Arc::downgrade(&ports));
        Ok(ports)
    }

    fn open(addresses: &[IpAddr], range: Option<ListeningPorts>) -> Result<Self> {
        let (mut sockets, mut endpoints) = (Vec::new(), Vec::new());
        for address in addresses {
            let cannot = |cause| Error::io(format!("cannot listen on {address}"), cause);
            let socket = listen_at_free_port(*address, range, listen_at).map_err(cannot)?;
            socket.set_nonblocking(true).map_err(cannot)?;
            endpoints.push(socket.local_addr().map_err(cannot)?);
            sockets.push(ShrinkSocket::from(socket));
        }
        let shared = Arc::new(PortsShared::new()?);
        let thread = ShrinkThread::new(Arc::clone(&shared), sockets);
        let builder = std::thread::Builder::new().name("flexring-shrink".to_owned());
        let thread = process::spawn(builder, move || thread.run())
            .map_err(|cause| Error::io("cannot start the thread that answers ranks that shrink", cause))?;
        let creator = CreatorProcess::current();
        Ok(Self { addresses: addresses.to_vec(), endpoints, shared, thread: Some(thread), creator })
    }

    /// In the order of the addresses.
    pub(super) fn endpoints(&self) -> &[SocketAddr] {
        &self.endpoints
    }

    /// Whether this process opened the ports, and is not a forked child. In a child no other function may be
    /// called: a lock may be held for ever.
    pub(super) fn are_of_this_process(&self) -> bool {
        self.creator.is_current()
    }

    /// From now on others may look for one more rank that is not served yet.
    pub(super) fn begin_join(&self) {
        self.shared.begin_join();
    }

    /// That rank is served, or will not be.
    pub(super) fn end_join(&self) {
        self.shared.end_join();
    }

    /// Has the thread serve `rank`.
    ///
    /// # Errors
    /// `Internal` if the thread has ended.
    pub(super) fn serve(&self, rank: ServedRank) -> Result<()> {
        self.shared.serve(rank)
    }

    /// Wakes the thread.
    pub(super) fn wake(&self) {
        self.shared.wake.notify();
    }
}

impl Drop for ShrinkPorts {
    fn drop(&mut self) {
        if !self.creator.is_current() {
            // A forked child has no such thread.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.leave();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that answers ranks that shrink panicked");
        }
    }
}

#[cfg(test)]
mod tests;
