//! The engine of `make fuzz`: libFuzzer.
//!
//! Owns its command line. libFuzzer ends the process, with status 0 if no input failed.

use super::FuzzTarget;
use std::cell::Cell;
use std::ffi::{CString, c_char, c_int};
use std::time::Duration;

unsafe extern "C" {
    fn LLVMFuzzerRunDriver(
        argc: *mut c_int,
        argv: *mut *mut *mut c_char,
        callback: extern "C" fn(*const u8, usize) -> c_int,
    ) -> c_int;
}

// Links the engine. `LLVMFuzzerTestOneInput` in it is not used, because the driver gets a callback.
use libfuzzer_sys as _;
#[unsafe(no_mangle)]
#[allow(improper_ctypes_definitions, reason = "libfuzzer-sys declares it so")]
extern "C" fn rust_fuzzer_test_input(_: &[u8]) -> c_int {
    0
}

thread_local! {
    /// What the callback runs: the driver runs inputs in the thread that it is called in.
    static CHECK: Cell<Option<&'static dyn Fn(&[u8])>> = const { Cell::new(None) };
}

extern "C" fn run_input(bytes: *const u8, len: usize) -> c_int {
    let input: &[u8] = if len == 0 {
        &[]
    } else {
        // SAFETY: libFuzzer passes `len` bytes, which it does not change during the call.
        unsafe { std::slice::from_raw_parts(bytes, len) }
    };
    let check = CHECK.get().expect("set before the driver runs");
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(input))).is_err() {
        std::process::abort();
    }
    0
}

/// Runs `check` for this long, beginning with `inputs`. Does not return.
pub(super) fn run(target: &FuzzTarget, inputs: &[Vec<u8>], time: Duration, check: &dyn Fn(&[u8])) -> ! {
    let (found, seeds) = (target.folder("found"), target.folder("seeds"));
    for folder in [&found, &seeds, &target.folder("failures")] {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    for (number, input) in inputs.iter().enumerate() {
        std::fs::write(seeds.join(number.to_string()), input).expect("a file");
    }
    let arguments = [
        target.name.to_owned(),
        format!("-max_total_time={}", time.as_secs()),
        format!("-max_len={}", target.longest),
        "-timeout=20".to_owned(),
        "-rss_limit_mb=4096".to_owned(),
        "-use_value_profile=1".to_owned(),
        "-print_final_stats=1".to_owned(),
        format!("-artifact_prefix={}/", target.folder("failures").display()),
        found.display().to_string(),
        seeds.display().to_string(),
    ];
    let arguments = arguments.map(|argument| CString::new(argument).expect("no zero byte").into_raw());
    let mut pointers: Vec<*mut c_char> = arguments.into_iter().chain([std::ptr::null_mut()]).collect();
    let (mut argc, mut argv) = (arguments.len() as c_int, pointers.as_mut_ptr());
    // SAFETY: this function does not return, so that what `check` borrows is valid as long as it is used.
    let check: &'static dyn Fn(&[u8]) = unsafe { std::mem::transmute(check) };
    CHECK.set(Some(check));
    // SAFETY: `argv` has `argc` texts that end with a zero byte and a null pointer, and lives until the
    // process ends.
    let status = unsafe { LLVMFuzzerRunDriver(&raw mut argc, &raw mut argv, run_input) };
    std::process::exit(status)
}
