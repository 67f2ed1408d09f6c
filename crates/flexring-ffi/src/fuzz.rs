//! Fuzz target: calls of the C ABI with random arguments, as far as a caller can pass them without undefined
//! behaviour.

use super::async_collectives::flexring_all_reduce_async;
use super::buffer::{flexring_alloc, flexring_deregister, flexring_free, flexring_register};
use super::collectives::*;
use super::comm::*;
use super::statistics::flexring_comm_rail_statistics;
use super::status::{flexring_last_error, flexring_result};
use super::types::flexring_op_create_premul_sum;
use super::unique_id::flexring_unique_id;
use flexring::{Communicator, Identity};
use flexring_core::config::Config;
use flexring_testkit::fuzzing::{FuzzTarget, InputReader};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

/// Elements of a vector that is valid, at most.
const ELEMENTS: usize = 64;

/// Memory of a caller: aligned, and as long as the longest vectors, with room for pointers that are not
/// aligned.
#[repr(align(64))]
struct Memory([u8; 4 * 8 * ELEMENTS]);

impl Memory {
    /// A pointer that is valid for `ELEMENTS` elements of any type, NULL, or one that no memory has.
    fn pointer(&mut self, choice: u8) -> *mut c_void {
        let start = self.0.as_mut_ptr();
        match choice % 8 {
            0 => null_mut(),
            1 => start.wrapping_add(1).cast(),
            2 => start.wrapping_add(8 * ELEMENTS + 4).cast(),
            3 => start.wrapping_add(16 * ELEMENTS).cast(),
            4 => (usize::MAX - 15) as *mut c_void,
            5 => 64 as *mut c_void,
            _ => start.cast(),
        }
    }
}

/// A count of a valid vector, or one that no memory holds.
fn count(reader: &mut InputReader<'_>) -> usize {
    match reader.byte() {
        small @ 0..=0x7f => usize::from(small) % (ELEMENTS + 1),
        0x80..=0xbf => usize::MAX - usize::from(reader.byte()),
        _ => 1 << (45 + reader.below(19)),
    }
}

/// Result, and a message that belongs to it.
fn check(result: flexring_result) -> bool {
    // SAFETY: the library returns a text that lives until the next call of this thread.
    let message = unsafe { CStr::from_ptr(flexring_last_error()) };
    let failed = result != flexring_result::FLEXRING_SUCCESS;
    assert!(!failed || !message.is_empty());
    assert_ne!(result, flexring_result::FLEXRING_INTERNAL_ERROR, "{message:?}");
    !failed
}

#[test]
fn calls_with_any_arguments() {
    let communicator =
        Communicator::with_config(&Config::default(), &Identity::alone()).expect("a world of one");
    let comm = handle_of(communicator).expect("a handle");
    let seeds: Vec<Vec<u8>> =
        (0..21u8).map(|function| vec![function, 1, 6, 3, 10, 7, 0, 0, 0, 0, 0, 0, 0, 0]).collect();
    // Vectors are staged in buffers of the communicator; a new communicator of one rank takes some, too.
    let target = FuzzTarget { name: "c_abi", longest: 256, memory: 64 << 20 };
    let memory = std::cell::RefCell::new(Box::new(Memory([0; 4 * 8 * ELEMENTS])));
    target.run(&seeds, |input| {
        let memory = &mut **memory.borrow_mut();
        let mut reader = InputReader::new(input);
        while !reader.is_empty() {
            let function = reader.byte() % 21;
            let comm = if reader.byte().is_multiple_of(8) { null_mut() } else { comm };
            let (send, recv) = (memory.pointer(reader.byte()), memory.pointer(reader.byte()));
            let count = count(&mut reader);
            let dtype = match reader.byte() {
                small @ 0..=0x7f => c_int::from(small) % 14,
                _ => reader.word() as c_int,
            };
            let op = match reader.byte() {
                small @ 0..=0x7f => u64::from(small) % 6,
                _ => reader.word(),
            };
            let root = c_int::from(reader.byte() as i8);
            let mut pointer_out = 8 as *mut c_void;
            let mut number_out: c_int = -7;
            let shift = usize::from(reader.byte() % 8 == 1);
            let out: *mut *mut c_void = match reader.byte() % 4 {
                0 => null_mut(),
                // Not aligned.
                _ if shift == 1 => memory.pointer(1).cast(),
                _ => &raw mut pointer_out,
            };
            let number: *mut c_int = if out.is_null() {
                null_mut()
            } else if shift == 1 {
                out.cast()
            } else {
                &raw mut number_out
            };
            // SAFETY: the handle is live or NULL. Vectors are valid for all counts that some memory can hold,
            // or begin where this process has no memory, which the library checks.
            unsafe {
                match function {
                    0 => drop(check(flexring_all_reduce(send, recv, count, dtype, op, comm, null_mut()))),
                    1 => drop(check(flexring_reduce_scatter(send, recv, count, dtype, op, comm, null_mut()))),
                    2 => drop(check(flexring_all_gather(send, recv, count, dtype, comm, null_mut()))),
                    3 => drop(check(flexring_broadcast(send, recv, count, dtype, root, comm, null_mut()))),
                    4 => drop(check(flexring_reduce(send, recv, count, dtype, op, root, comm, null_mut()))),
                    5 => {
                        if check(flexring_all_reduce_async(send, recv, count, dtype, op, comm, out.cast())) {
                            let request = pointer_out.cast();
                            check(flexring_test(request, number));
                            check(flexring_wait(request));
                            pointer_out = 8 as *mut c_void;
                        }
                    }
                    6 => drop((check(flexring_test(null_mut(), number)), check(flexring_wait(null_mut())))),
                    7 => {
                        let bytes = if count < 1 << 44 { count << 10 } else { count };
                        if check(flexring_alloc(comm, bytes, out)) {
                            check(flexring_free(comm, pointer_out));
                            assert!(!check(flexring_free(comm, pointer_out)), "freed twice");
                            pointer_out = 8 as *mut c_void;
                        }
                    }
                    8 => drop(check(flexring_free(comm, send))),
                    9 => {
                        if check(flexring_register(comm, send, count)) {
                            check(flexring_deregister(comm, send, count));
                        }
                    }
                    10 => drop(check(flexring_deregister(comm, send, count))),
                    11 => drop(check(flexring_comm_rank(comm, number))),
                    12 => drop((
                        check(flexring_comm_size(comm, number)),
                        check(flexring_comm_local_rank(comm, number)),
                    )),
                    13 => drop((check(flexring_comm_status(comm)), check(flexring_comm_synchronize(comm)))),
                    14 => drop(check(flexring_op_create_premul_sum(f32::from_bits(op as u32), out.cast()))),
                    15 => {
                        let mut internal = [0; 128];
                        let bytes = reader.bytes(128);
                        internal[..bytes.len()].copy_from_slice(bytes);
                        check(flexring_comm_init_rank(
                            out.cast(),
                            root,
                            flexring_unique_id { internal },
                            dtype,
                        ));
                    }
                    // Nothing is excluded: a world of one without its rank is an error.
                    16 => {
                        let exclude = [root, 0, 1];
                        let list = if shift == 1 {
                            (&raw const exclude).cast::<u8>().wrapping_add(1).cast()
                        } else {
                            exclude.as_ptr()
                        };
                        check(flexring_comm_shrink(
                            comm,
                            if dtype % 2 == 0 { list } else { null_mut() },
                            count.max(1),
                            out.cast(),
                        ));
                    }
                    17 => drop(check(flexring_comm_split(comm, -2 - (root & 0xff), dtype, out.cast()))),
                    18 => {
                        check(flexring_comm_abort(null_mut()));
                        check(flexring_comm_abort_on_exit(null_mut(), std::ptr::null()));
                    }
                    // There are no rails.
                    19 => {
                        let (rails, capacity) = (recv.cast(), root as usize);
                        if check(flexring_comm_rail_statistics(comm, count, rails, capacity, out.cast())) {
                            assert!(pointer_out.is_null(), "the number of rails");
                            pointer_out = 8 as *mut c_void;
                        }
                    }
                    _ => drop(check(flexring_comm_free(null_mut()))),
                }
            }
            let wrote_number = matches!(function, 5 | 6 | 11 | 12);
            assert!(
                pointer_out as usize == 8 || function == 14,
                "function {function} wrote its output and failed"
            );
            assert!(number_out == -7 || wrote_number, "function {function} wrote a number");
        }
    });
    // SAFETY: it was made above and is not used any more.
    unsafe { flexring_comm_free(comm) };
}
