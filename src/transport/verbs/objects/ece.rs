//! Options of Enhanced Connection Establishment (ECE): features that a connection has only if the devices of
//! both ends have them.
//!
//! Owns their form.

use super::bindings::ibv_ece;

/// ECE options (`ibv_ece`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct EceOptions {
    /// The vendor of the device. Options of different vendors have nothing in common.
    pub vendor_id: u32,
    /// Features, which only the vendor's drivers can tell apart.
    pub options: u32,
    /// Which further fields are valid: none so far.
    pub comp_mask: u32,
}

impl EceOptions {
    /// The options that a driver returned; `None` if it names no vendor.
    pub(super) fn from_raw(raw: ibv_ece) -> Option<Self> {
        let ibv_ece { vendor_id, options, comp_mask } = raw;
        (vendor_id != 0).then_some(Self { vendor_id, options, comp_mask })
    }

    /// The options as libibverbs takes them.
    pub(super) fn to_raw(self) -> ibv_ece {
        let Self { vendor_id, options, comp_mask } = self;
        ibv_ece { vendor_id, options, comp_mask }
    }
}
