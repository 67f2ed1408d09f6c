//! The host device.
