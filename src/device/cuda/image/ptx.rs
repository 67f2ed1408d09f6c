//! What PTX says about accesses to the memory of other GPUs.
//!
//! Owns the way from the addresses of peers, which kernels of collectives keep in an array in shared memory,
//! to the instructions that use them. Only tests need it.

use std::collections::BTreeSet;

/// The number of instructions of a kernel that access memory of peers. The error is the first one that does
/// so by an atomic operation or without the scope of the system.
pub(super) fn accesses_of_peers(kernel: &str) -> Result<usize, String> {
    let instructions: Vec<(&str, &str)> =
        kernel.lines().flat_map(|line| line.split(';')).filter_map(parsed).collect();
    let mut addresses = BTreeSet::new();
    loop {
        let before = addresses.len();
        for (operation, operands) in &instructions {
            let (into, from) = operands.split_once(',').unwrap_or((operands, ""));
            let is_peer = if operation.starts_with("ld.") {
                // Other values in shared memory have places of their own.
                operation.starts_with("ld.shared.u64") && from.contains("[%")
            } else {
                !operation.starts_with("st.") && registers(from).any(|register| addresses.contains(register))
            };
            if is_peer {
                addresses.extend(registers(into));
            }
        }
        if addresses.len() == before {
            break;
        }
    }
    let mut count = 0;
    for (operation, operands) in instructions {
        let address = operands
            .split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'))
            .map_or("", |(address, _)| address);
        if operation.starts_with("ld.param")
            || !registers(address).any(|register| addresses.contains(register))
        {
            continue;
        }
        if !operation.contains(".sys") || !(operation.starts_with("ld.") || operation.starts_with("st.")) {
            return Err(format!("{operation} {operands}"));
        }
        count += 1;
    }
    Ok(count)
}

/// The operation and the operands of an instruction.
fn parsed(text: &str) -> Option<(&str, &str)> {
    let text = text.trim();
    let text = if text.starts_with('@') { text.split_once(char::is_whitespace)?.1.trim() } else { text };
    let (operation, operands) = text.split_once(char::is_whitespace)?;
    (operation.starts_with(char::is_alphabetic)).then(|| (operation, operands.trim()))
}

/// The registers of 64 bits in these operands.
fn registers(operands: &str) -> impl Iterator<Item = &str> {
    operands
        .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '%')
        .filter(|word| word.starts_with("%rd"))
}

#[cfg(test)]
mod tests {
    use super::accesses_of_peers;

    #[test]
    fn accesses_without_the_scope_of_the_system_are_found() {
        let kernel = |access: &str| {
            format!(
                "ld.shared.u64 %rd2, [shared+192];\nld.shared.u64 \t%rd1, [%r4];\nadd.s64 %rd3, %rd1, 128;\n\
                 ld.global.u64 %rd9, [%rd2];\n@%p1 mov.u64 %rd5, %rd3;\n{access}"
            )
        };
        assert_eq!(accesses_of_peers(&kernel("st.relaxed.sys.global.v2.u64 [%rd5], {%rd9, %rd9};")), Ok(1));
        for access in [
            "st.relaxed.gpu.global.u64 [%rd5], %rd9;",
            "@%p2 ld.global.u32 %r1, [%rd3+4];",
            "atom.add.relaxed.sys.global.u64 %rd7, [%rd5], 1;",
        ] {
            assert!(accesses_of_peers(&kernel(access)).is_err(), "{access}");
        }
        assert_eq!(accesses_of_peers(&kernel("st.global.u64 [%rd2], %rd3;")), Ok(0));
    }
}
