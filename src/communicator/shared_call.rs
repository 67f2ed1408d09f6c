//! A call on registered memory that neighbours share.
//!
//! Owns the change of its vectors to their addresses in the arena, and what has to be copied for that before
//! and after the call.

use super::checked_call::CheckedCall;
use super::registered_pages::SharedVector;
use crate::memory::Piece;
use std::sync::Arc;

/// A call with vectors in the arena in place of the caller's. When it is dropped, after the call, the results
/// are in the caller's memory.
pub(super) struct SharedCall {
    call: CheckedCall,
    input: Option<SharedVector>,
    output: Option<SharedVector>,
    /// By message of a group, with whether it is received.
    messages: Vec<(SharedVector, bool)>,
}

impl SharedCall {
    /// `call` with those of its vectors in the arena that `find` finds there; `None` if it finds none.
    pub(super) fn new(call: &CheckedCall, find: impl Fn(Piece) -> Option<SharedVector>) -> Option<Self> {
        if call.on_gpu {
            return None;
        }
        let mut shared = Self { call: call.clone(), input: None, output: None, messages: Vec::new() };
        if let Some(messages) = &call.messages {
            let mut messages = messages.to_vec();
            for message in &mut messages {
                if let Some(vector) = find(message.piece) {
                    message.piece = vector.alias();
                    shared.messages.push((vector, !message.is_send));
                }
            }
            if shared.messages.is_empty() {
                return None;
            }
            shared.call.messages = Some(Arc::from(messages));
        } else {
            (shared.input, shared.output) = (find(call.input), find(call.output));
            let are_beside = || shared.input.as_ref().zip(shared.output.as_ref());
            if call.in_place && are_beside().is_none_or(|(input, output)| !input.is_beside(output)) {
                // Elements that input and output have in common must have one address.
                return None;
            }
            if shared.input.is_none() && shared.output.is_none() {
                return None;
            }
            shared.call.input = shared.input.as_ref().map_or(call.input, SharedVector::alias);
            shared.call.output = shared.output.as_ref().map_or(call.output, SharedVector::alias);
        }
        // Also what is written, because a call that fails may leave it as it was.
        shared.vectors().for_each(|(vector, _)| vector.load());
        Some(shared)
    }

    /// The call with its vectors in the arena.
    pub(super) fn call(&self) -> &CheckedCall {
        &self.call
    }

    /// All vectors in the arena, with whether the call writes them.
    fn vectors(&self) -> impl Iterator<Item = (&SharedVector, bool)> {
        let messages = self.messages.iter().map(|(vector, is_received)| (vector, *is_received));
        let input = self.input.iter().map(|vector| (vector, false));
        input.chain(self.output.iter().map(|vector| (vector, true))).chain(messages)
    }
}

impl Drop for SharedCall {
    fn drop(&mut self) {
        self.vectors().filter(|(_, is_written)| *is_written).for_each(|(vector, _)| vector.store());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::block_lists::BlockLists;
    use crate::communicator::checked_call::CallValidator;
    use crate::communicator::registered_pages::RegisteredPages;
    use crate::dtype::{DType, ReduceOp};
    use crate::memory::{Arena, lend_in_place};

    const LEN: usize = 400_000;

    #[test]
    fn vectors_in_place_move_together_or_not_at_all() {
        let arena = Arc::new(Arena::new(1).expect("memory"));
        let block_lists = BlockLists::default();
        let validator = CallValidator { rank: 0, world: 2, block_lists: &block_lists };
        let mut vector = vec![1u8; LEN];
        lend_in_place(&mut vector, |whole| {
            let part = whole.narrow(0, LEN / 2);
            let gather = validator.all_gather(part, whole, DType::U8).expect("valid");
            for (registered, moves) in [(part, false), (whole, true)] {
                let pages = Arc::new(RegisteredPages::new(Some(&arena), registered));
                let shared = SharedCall::new(&gather, |piece| pages.find(&arena, piece));
                assert_eq!(shared.is_some(), moves);
                if let Some(shared) = shared {
                    let CheckedCall { input, output, .. } = *shared.call();
                    assert!(arena.offset_of(input).is_some() && input.as_ptr() == output.as_ptr());
                }
            }
        });
    }

    #[test]
    fn one_of_two_vectors_may_be_registered() {
        let arena = Arc::new(Arena::new(1).expect("memory"));
        let block_lists = BlockLists::default();
        let validator = CallValidator { rank: 0, world: 2, block_lists: &block_lists };
        let mut vector = vec![1u8; 2 * LEN];
        lend_in_place(&mut vector, |whole| {
            let (send, receive) = (whole.narrow(0, LEN), whole.narrow(LEN, LEN));
            let call = validator.all_reduce(send, receive, DType::U8, ReduceOp::Sum).expect("valid");
            for registered in [send, receive] {
                let pages = Arc::new(RegisteredPages::new(Some(&arena), registered));
                let shared =
                    SharedCall::new(&call, |piece| pages.find(&arena, piece)).expect("one is shared");
                let in_arena =
                    [shared.call().input, shared.call().output].map(|piece| arena.offset_of(piece).is_some());
                assert_eq!(in_arena, [registered == send, registered == receive]);
            }
            assert!(SharedCall::new(&call, |_| None).is_none());
        });
    }
}
