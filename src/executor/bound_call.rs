//! A call with its memory, as the communicator hands it to the executor.

use crate::call::Call;
use crate::device::Arithmetic;
use crate::memory::Piece;

/// A validated call with its memory.
#[derive(Clone, Copy, Debug)]
pub struct BoundCall {
    /// The call, as this rank announces it to its peers.
    pub call: Call,
    /// This rank's contribution: the input window of the program.
    pub input: Piece,
    /// The result's memory: the output window of the program.
    pub output: Piece,
    /// Memory as long as the whole vector, for intermediate sums outside the output window; empty where the window is
    /// the whole vector.
    pub scratch: Piece,
    /// Whether the elements that input and output have in common are the same memory; otherwise the two are disjoint.
    pub in_place: bool,
    /// How elements are combined.
    pub arithmetic: Arithmetic,
    /// Whether the sum is divided by the number of ranks.
    pub average: bool,
    /// Whether contributions are multiplied by the call's factor.
    pub prescale: bool,
}

/// How a call is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallPath {
    /// Through the mailboxes: every rank reads every rank's vector, without a program.
    Small,
    /// By the program that was installed under this number.
    Program(usize),
}
