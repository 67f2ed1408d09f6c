//! What a communicator's rails have carried.

use super::comm::{borrow, flexring_comm};
use super::status::{check_pointer, flexring_result, guarded};
use flexring::RailStatistics;
use flexring_core::error::{Error, Result};
use std::ffi::c_char;

/// Bytes of a device's name in flexring_rail_statistics.
pub const FLEXRING_DEVICE_NAME_BYTES: usize = 64;

/// What a rail has carried since the communicator was made. A rail is a port of an RDMA device. A message is
/// an RDMA write of the library, so the short ones count that announce calls and grant permission to write;
/// what is written again because a connection broke counts again. Later versions may add members at the end.
#[allow(non_camel_case_types, reason = "named as C names types")]
#[derive(Clone, Copy)]
#[repr(C)]
pub struct flexring_rail_statistics {
    /// The name of the device, such as mlx5_0, with a NUL at the end.
    pub device: [c_char; FLEXRING_DEVICE_NAME_BYTES],
    /// The number of the port, from 1.
    pub port: u32,
    /// 0.
    pub reserved: u32,
    /// Bytes that this rank has given to the device to send, without headers.
    pub bytes_sent: u64,
    /// Bytes that peers have written to this rank's memory.
    pub bytes_received: u64,
    /// Messages that this rank has given to the device to send.
    pub messages_sent: u64,
    /// Messages that have arrived.
    pub messages_received: u64,
    /// How often the port has sent something again, for any program; -1 if its driver does not count that.
    pub retransmissions: i64,
    /// How often a connection over this rail was made again after it had broken.
    pub reconnections: u64,
}

impl From<RailStatistics> for flexring_rail_statistics {
    fn from(rail: RailStatistics) -> Self {
        let mut device = [0; FLEXRING_DEVICE_NAME_BYTES];
        // The last byte stays NUL. The kernel's names are shorter.
        for (to, from) in device[..FLEXRING_DEVICE_NAME_BYTES - 1].iter_mut().zip(rail.device.bytes()) {
            *to = from as c_char;
        }
        Self {
            device,
            port: rail.port.into(),
            reserved: 0,
            bytes_sent: rail.bytes_sent,
            bytes_received: rail.bytes_received,
            messages_sent: rail.messages_sent,
            messages_received: rail.messages_received,
            retransmissions: rail
                .retransmissions
                .map_or(-1, |count| i64::try_from(count).unwrap_or(i64::MAX)),
            reconnections: rail.reconnections,
        }
    }
}

/// Writes what the rails of this rank have carried to `rails`, in the order of the rails, and their number to
/// `count`. The number is 0 if this rank sends nothing over RDMA devices. If it is greater than `capacity`,
/// only the first `capacity` rails are written; `rails` may be NULL if that is 0. `struct_size` is
/// sizeof(flexring_rail_statistics) in the program; members that the library does not have are set to 0. May
/// be called from any thread, also during a call.
///
/// # Safety
/// `comm` is NULL or a live handle; `rails` points to `capacity` structs of `struct_size` bytes, and may be
/// NULL if there are none; `count` is NULL or points to a size_t that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_rail_statistics(
    comm: *const flexring_comm,
    struct_size: usize,
    rails: *mut flexring_rail_statistics,
    capacity: usize,
    count: *mut usize,
) -> flexring_result {
    const FUNCTION: &str = "flexring_comm_rail_statistics";
    guarded(|| {
        // SAFETY: the caller guarantees the handle.
        let comm = unsafe { borrow(comm, FUNCTION)? };
        check_pointer(count, FUNCTION, "count")?;
        if capacity > 0 {
            check_pointer(rails, FUNCTION, "rails")?;
        }
        let known = comm.communicator.rail_statistics();
        // SAFETY: the caller guarantees `rails`, which is not NULL if `capacity` is not 0.
        let written = unsafe { write_rails(&known, struct_size, rails, capacity) };
        written.map_err(|error| error.context(FUNCTION))?;
        // SAFETY: `count` is not NULL, and the caller guarantees that it may be written.
        unsafe { count.write(known.len()) };
        Ok(())
    })
}

/// Writes the first `capacity` rails to structs of `struct_size` bytes each.
///
/// # Safety
/// `to` is aligned and points to `capacity` structs of `struct_size` bytes that may be written, unless there
/// are none.
unsafe fn write_rails(
    rails: &[RailStatistics],
    struct_size: usize,
    to: *mut flexring_rail_statistics,
    capacity: usize,
) -> Result<()> {
    let size = size_of::<flexring_rail_statistics>();
    if struct_size < size || !struct_size.is_multiple_of(align_of::<flexring_rail_statistics>()) {
        let message = format!(
            "struct_size is {struct_size}, but flexring_rail_statistics has {size} bytes: pass its sizeof, of the header of this library or \
             a later one"
        );
        return Err(Error::invalid_argument(message));
    }
    for (index, rail) in rails.iter().take(capacity).enumerate() {
        // SAFETY: there are more structs than `index`, of `struct_size` bytes each.
        let place = unsafe { to.cast::<u8>().add(index * struct_size) };
        // SAFETY: the struct has `struct_size` bytes from here, of which `size` are known. It is aligned,
        // because the first one is, and the size of each is a multiple of the alignment.
        unsafe {
            place.cast::<flexring_rail_statistics>().write(rail.clone().into());
            place.add(size).write_bytes(0, struct_size - size);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_core::error::ErrorKind;
    use std::ffi::CStr;

    const SIZE: usize = size_of::<flexring_rail_statistics>();

    /// A rail with this much of everything.
    fn rail(device: &str, value: u64) -> RailStatistics {
        let mut rail = RailStatistics::default();
        (rail.device, rail.port) = (device.to_owned(), value as u8);
        (rail.bytes_sent, rail.bytes_received) = (value, value + 1);
        (rail.messages_sent, rail.messages_received) = (value + 2, value + 3);
        (rail.retransmissions, rail.reconnections) = (Some(value + 4), value + 5);
        rail
    }

    fn name(rail: &flexring_rail_statistics) -> &str {
        // SAFETY: the name ends with a NUL.
        unsafe { CStr::from_ptr(rail.device.as_ptr()) }.to_str().expect("ASCII")
    }

    /// What a program gets for these rails, whose structs are followed by `more` words, with room for three.
    fn written(rails: &[RailStatistics], more: usize, capacity: usize) -> Vec<u64> {
        let words = SIZE / 8 + more;
        let mut memory = vec![u64::MAX; 3 * words];
        // SAFETY: there is room for three structs of this size, and words are aligned as the struct is.
        unsafe { write_rails(rails, 8 * words, memory.as_mut_ptr().cast(), capacity) }.expect("a valid size");
        memory
    }

    #[test]
    fn every_member_has_its_value() {
        let long = "d".repeat(100);
        let mut uncounted = rail(&long, 30);
        uncounted.retransmissions = None;
        let memory = written(&[rail("mlx5_0", 10), uncounted], 0, 3);
        // SAFETY: the structs were written there, and consist of integers.
        let [first, second] = unsafe { &*memory.as_ptr().cast::<[flexring_rail_statistics; 2]>() };
        assert_eq!((name(first), first.port, first.reserved), ("mlx5_0", 10, 0));
        assert_eq!((first.bytes_sent, first.bytes_received), (10, 11));
        assert_eq!((first.messages_sent, first.messages_received), (12, 13));
        assert_eq!((first.retransmissions, first.reconnections), (14, 15));
        assert_eq!((name(second).len(), second.retransmissions), (FLEXRING_DEVICE_NAME_BYTES - 1, -1));
        assert!(memory[2 * SIZE / 8..].iter().all(|word| *word == u64::MAX), "there is no third rail");
    }

    #[test]
    fn no_more_rails_are_written_than_there_is_room_for() {
        let rails = [rail("one", 1), rail("two", 2)];
        for capacity in 0..3 {
            let memory = written(&rails, 0, capacity);
            let (used, unused) = memory.split_at(capacity * SIZE / 8);
            assert!(used.chunks(SIZE / 8).all(|rail| rail[0] != u64::MAX), "{capacity}");
            assert!(unused.iter().all(|word| *word == u64::MAX), "{capacity}");
        }
    }

    #[test]
    fn members_that_the_library_does_not_have_are_zero() {
        let memory = written(&[rail("one", 1), rail("two", 2)], 2, 3);
        let words = SIZE / 8 + 2;
        for rail in 0..2 {
            assert_eq!(memory[rail * words + SIZE / 8..][..2], [0, 0]);
            assert_ne!(memory[rail * words], u64::MAX);
        }
    }

    #[test]
    fn sizes_of_no_header_are_refused() {
        for size in [0, SIZE - 8, SIZE + 1, SIZE - 1] {
            // SAFETY: there is no struct.
            let refused = unsafe { write_rails(&[rail("one", 1)], size, std::ptr::null_mut(), 0) };
            let error = refused.expect_err("no such size");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(&format!("struct_size is {size}")), "{error}");
        }
    }
}
