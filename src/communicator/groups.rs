//! Sends and receives between two ranks, alone or in groups.
//!
//! Owns the public methods for them, and the checks of their arguments.

use super::checked_call::{CallValidator, CheckedCall};
use super::{Communicator, Owned, Request};
use crate::call::{Call, Collective};
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::PeerMessage;
use crate::memory::{self, Loan, Piece};
use crate::rank::Rank;
use std::marker::PhantomData;
use std::sync::Arc;

/// A send or a receive of a [`group`](Communicator::group).
///
/// ```
/// use flexring::{Communicator, Operation};
///
/// # fn main() -> flexring::Result<()> {
/// let comm = Communicator::local(1)?.remove(0);
/// let next = (comm.rank() + 1) % comm.size();
/// let previous = (comm.rank() + comm.size() - 1) % comm.size();
/// let (sent, mut received) = ([comm.rank() as u32], [0]);
/// comm.group([Operation::send(&sent, next), Operation::recv(&mut received, previous)])?;
/// # assert_eq!(received, sent);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Operation<'a> {
    message: PeerMessage,
    vector: PhantomData<Loan<'a>>,
}

impl<'a> Operation<'a> {
    /// Sends `vector` to the rank `to`.
    #[must_use]
    pub fn send<T: Element>(vector: &'a [T], to: Rank) -> Self {
        Self::new(Loan::of(vector), T::DTYPE, true, to)
    }

    /// Receives `vector` from the rank `from`, which sends as many elements of the same type.
    #[must_use]
    pub fn recv<T: Element>(vector: &'a mut [T], from: Rank) -> Self {
        Self::new(Loan::of_mut(vector), T::DTYPE, false, from)
    }

    fn new(loan: Loan<'a>, dtype: DType, is_send: bool, peer: Rank) -> Self {
        let message = PeerMessage { is_send, peer, dtype, piece: loan.piece() };
        Self { message, vector: PhantomData }
    }
}

/// A send or a receive of a [`group_async`](Communicator::group_async), which owns its vector.
///
/// ```
/// use flexring::{Communicator, OwnedOperation};
///
/// # fn main() -> flexring::Result<()> {
/// let comm = Communicator::local(1)?.remove(0);
/// let operations = vec![OwnedOperation::Send(vec![7u8], 0), OwnedOperation::Recv(vec![0], 0)];
/// let operations = comm.group_async(operations)?.wait()?;
/// assert_eq!(operations[1], OwnedOperation::Recv(vec![7], 0));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnedOperation<B> {
    /// Sends the vector to this rank.
    Send(B, Rank),
    /// Receives the vector from this rank.
    Recv(B, Rank),
}

impl<B: Owned> OwnedOperation<B> {
    /// The vector.
    pub fn into_vector(self) -> B {
        match self {
            Self::Send(vector, _) | Self::Recv(vector, _) => vector,
        }
    }

    fn message(&mut self) -> PeerMessage {
        let (is_send, peer) = match self {
            Self::Send(_, peer) => (true, *peer),
            Self::Recv(_, peer) => (false, *peer),
        };
        let vector = match self {
            Self::Send(vector, _) | Self::Recv(vector, _) => vector,
        };
        // The request owns the vector until the call is over.
        let piece = memory::lend_in_place(vector.elements(), |piece| piece);
        PeerMessage { is_send, peer, dtype: B::Item::DTYPE, piece }
    }
}

impl Communicator {
    /// Sends `vector` to the rank `to`, which receives it by [`recv`](Self::recv) or in a
    /// [`group`](Self::group). The n-th send from one rank to another matches the n-th receive there. May
    /// wait until the receiver makes its call, and may return before.
    ///
    /// # Errors
    /// As for [`group`](Self::group).
    pub fn send<T: Element>(&self, vector: &[T], to: Rank) -> Result<()> {
        self.group([Operation::send(vector, to)])
    }

    /// Receives `vector` from the rank `from`, which sends it by [`send`](Self::send) or in a
    /// [`group`](Self::group). There is no receive from any rank: to take messages as they come, have one in
    /// a [`group`](Self::group) for each rank that may send.
    ///
    /// # Errors
    /// As for [`group`](Self::group).
    pub fn recv<T: Element>(&self, vector: &mut [T], from: Rank) -> Result<()> {
        self.group([Operation::recv(vector, from)])
    }

    /// Makes all these sends and receives together: none of them waits for another, so ranks may send to each
    /// other, or to themselves. Only ranks that send or receive take part. Between two ranks the n-th send
    /// matches the n-th receive, whatever groups they are in, if both lie between the same two collectives.
    ///
    /// # Errors
    /// `Disagreement` if a rank sends another number or type of elements than the other expects, or one of
    /// them calls a collective instead; `Timeout`, naming the ranks that this one waits for, if they do not
    /// make the counterparts; `PeerLost` if one of them leaves without; `InvalidArgument` for a rank that
    /// does not exist, vectors that overlap, or sends to this rank itself that do not match its own receives;
    /// `Aborted` as for [`all_reduce`](Self::all_reduce).
    pub fn group<'a>(&self, operations: impl IntoIterator<Item = Operation<'a>>) -> Result<()> {
        // The operations borrow their vectors until this returns.
        let messages = operations.into_iter().map(|operation| operation.message).collect();
        self.run(&self.validator().group(messages)?)
    }

    /// Starts a [`group`](Self::group) and returns at once. The request returns the operations with their
    /// vectors.
    ///
    /// # Errors
    /// `InvalidArgument` at once; all other errors when the request is waited for.
    pub fn group_async<B: Owned>(
        &self,
        mut operations: Vec<OwnedOperation<B>>,
    ) -> Result<Request<Vec<OwnedOperation<B>>>> {
        let messages = operations.iter_mut().map(OwnedOperation::message).collect();
        let outcome = self.submit(self.validator().group(messages)?)?;
        Ok(Request { outcome, vector: Some(operations) })
    }

    /// Starts a [`send`](Self::send) and returns at once. Calls run one after the other: to send and receive
    /// at the same time, use [`group_async`](Self::group_async).
    ///
    /// # Errors
    /// As for [`group_async`](Self::group_async).
    pub fn send_async<B: Owned>(&self, vector: B, to: Rank) -> Result<Request<B>> {
        self.start_one(vector, |piece, dtype| PeerMessage { is_send: true, peer: to, dtype, piece })
    }

    /// Starts a [`recv`](Self::recv) and returns at once, as [`send_async`](Self::send_async) does.
    ///
    /// # Errors
    /// As for [`group_async`](Self::group_async).
    pub fn recv_async<B: Owned>(&self, vector: B, from: Rank) -> Result<Request<B>> {
        self.start_one(vector, |piece, dtype| PeerMessage { is_send: false, peer: from, dtype, piece })
    }

    fn start_one<B: Owned>(
        &self,
        mut vector: B,
        message: impl FnOnce(Piece, DType) -> PeerMessage,
    ) -> Result<Request<B>> {
        let outcome = memory::lend_in_place(vector.elements(), |piece| {
            self.submit(self.validator().group(vec![message(piece, B::Item::DTYPE)])?)
        })?;
        Ok(Request { outcome, vector: Some(vector) })
    }
}

/// What is said to a program that receives from a rank that does not exist, as -1 or MPI_ANY_SOURCE.
pub const NO_RECV_FROM_ANY: &str = "; a receive names the rank that sends, there is none from any rank";

impl CallValidator<'_> {
    /// Checks a group of sends and receives.
    pub fn group(self, messages: Vec<PeerMessage>) -> Result<CheckedCall> {
        let Self { rank, world, .. } = self;
        let refuse = |message: String| Err(Error::invalid_argument(message));
        for message in &messages {
            let (name, direction) = if message.is_send { ("send", "to") } else { ("recv", "from") };
            if message.peer >= world {
                let peer = message.peer;
                let advice = if message.is_send { "" } else { NO_RECV_FROM_ANY };
                return refuse(format!(
                    "{name} {direction} rank {peer}: there are {world} ranks, from 0{advice}"
                ));
            }
            let (address, dtype) = (message.piece.as_ptr(), message.dtype);
            if !message.piece.is_empty() && !dtype.divides(address as usize) {
                let (size, dtype) = (dtype.size(), dtype.name());
                return refuse(format!(
                    "the buffer of a {name} at {address:p} is not aligned to the {size} bytes of a {dtype}"
                ));
            }
        }
        check_overlap(&messages)?;
        check_own(rank, &messages)?;
        let mut used = messages.iter().map(|message| message.piece).filter(|piece| !piece.is_empty());
        let on_gpu = match used.next() {
            None => messages.iter().any(|message| !message.piece.is_host()),
            Some(first) => {
                if let Some(other) = used.find(|piece| piece.memory() != first.memory()) {
                    return refuse(format!(
                        "a group has memory of {} and of {}: all of it must be in the same place",
                        first.memory(),
                        other.memory()
                    ));
                }
                !first.is_host()
            }
        };
        let mut peers = messages.iter().map(|message| message.peer);
        let peer = peers.next().filter(|first| peers.all(|peer| peer == *first));
        Ok(CheckedCall {
            collective: Collective::SendRecv,
            root: peer.unwrap_or(Call::SEVERAL_PEERS as Rank),
            input: Piece::EMPTY,
            output: Piece::EMPTY,
            dtype: DType::U8,
            op: ReduceOp::Sum,
            count: messages.len() as u64,
            blocks: None,
            messages: Some(Arc::from(messages)),
            in_place: false,
            on_gpu,
        })
    }
}

/// Refuses memory that is received into and used by another operation.
fn check_overlap(messages: &[PeerMessage]) -> Result<()> {
    let mut used: Vec<&PeerMessage> = messages.iter().filter(|message| !message.piece.is_empty()).collect();
    used.sort_unstable_by_key(|message| message.piece.as_ptr() as usize);
    // The operation that reaches furthest so far, of all and of the receives.
    let (mut any, mut received) = (0, 0);
    for message in used {
        let start = message.piece.as_ptr() as usize;
        let end = start + message.piece.len();
        if start < received || (!message.is_send && start < any) {
            let message =
                "two operations of a group overlap, and one of them receives: each needs memory of its own";
            return Err(Error::invalid_argument(message));
        }
        any = any.max(end);
        if !message.is_send {
            received = received.max(end);
        }
    }
    Ok(())
}

/// Checks that the sends of `rank` to itself are as many and as long as its receives from itself.
fn check_own(rank: Rank, messages: &[PeerMessage]) -> Result<()> {
    let own = |is_send: bool| {
        let own = messages.iter().filter(move |message| message.peer == rank && message.is_send == is_send);
        own.map(|message| (message.dtype.elements_in(message.piece.len()), message.dtype))
    };
    let (sends, receives) = (own(true).count(), own(false).count());
    if sends != receives {
        return Err(Error::invalid_argument(format!(
            "rank {rank} sends {sends} vectors to itself and receives {receives} from itself in one group"
        )));
    }
    match own(true).zip(own(false)).find(|(send, receive)| send != receive) {
        None => Ok(()),
        Some(((sent, dtype), (expected, other))) => Err(Error::invalid_argument(format!(
            "rank {rank} sends {sent} x {} to itself and expects {expected} x {}",
            dtype.name(),
            other.name()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_may_share_what_they_send_but_nothing_that_they_receive() {
        let mut vector = [0u8; 12];
        memory::lend_in_place(&mut vector, |piece| {
            let message = |is_send, at, len| PeerMessage {
                is_send,
                peer: 1,
                dtype: DType::U8,
                piece: piece.narrow(at, len),
            };
            let check = |messages: [PeerMessage; 3]| check_overlap(&messages);
            assert_eq!(check([message(true, 0, 8), message(true, 4, 4), message(false, 8, 4)]), Ok(()));
            assert_eq!(check([message(false, 0, 4), message(false, 4, 4), message(true, 0, 0)]), Ok(()));
            assert!(check([message(true, 0, 12), message(true, 0, 1), message(false, 8, 4)]).is_err());
            assert!(check([message(false, 0, 12), message(true, 0, 1), message(true, 11, 1)]).is_err());
            assert!(check([message(false, 0, 5), message(false, 4, 4), message(true, 0, 0)]).is_err());
        });
    }
}
