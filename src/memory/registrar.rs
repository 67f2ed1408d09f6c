//! Registering memory with devices that access it directly.

use super::piece::Piece;
use crate::error::Result;

/// Registers memory with devices. Registrations are counted.
pub trait Registrar: Send + Sync {
    /// Registers memory until it is deregistered as often as it was registered. Until then it must stay
    /// mapped to the same pages.
    ///
    /// # Errors
    /// `System` if the system or a device refuses.
    fn register(&self, piece: Piece) -> Result<()>;

    /// Ends one registration of exactly this memory. Operations in flight keep it until they are done.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not registered.
    fn deregister(&self, piece: Piece) -> Result<()>;

    /// Whether the devices access this memory of a GPU, which is registered.
    fn reaches(&self, piece: Piece) -> bool;

    /// Registers memory that can be used without registration, only more slowly. A failure is logged.
    fn try_register(&self, piece: Piece) {
        if let Err(error) = self.register(piece) {
            log::warn!("{} bytes are not registered and move more slowly: {}", piece.len(), error.message());
        }
    }

    /// Ends a registration by [`try_register`](Self::try_register).
    fn try_deregister(&self, piece: Piece) {
        if let Err(error) = self.deregister(piece) {
            log::debug!("{} bytes were not registered: {}", piece.len(), error.message());
        }
    }
}
