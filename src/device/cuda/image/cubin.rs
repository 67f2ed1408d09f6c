//! What machine code says about its kernels.
//!
//! Owns the format of the section `.nv.info` in an ELF file. Only tests need it.

use std::collections::BTreeMap;

/// A kernel, or a function that it calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CompiledFunction {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: arrays that are indexed at run time, and values that found no
    /// register.
    pub local: u32,
}

/// The functions of an image by name. `None` if it is no machine code.
pub(super) fn functions(image: &[u8]) -> Option<BTreeMap<String, CompiledFunction>> {
    if !image.starts_with(b"\x7fELF") {
        return None;
    }
    let sections = sections(image)?;
    let symbols = sections.iter().find(|section| section.kind == SYMBOLS)?;
    let names = sections.get(symbols.link as usize)?;
    let mut functions = BTreeMap::new();
    for section in sections.iter().filter(|section| section.kind == INFO && section.of == 0) {
        let mut attributes = bytes(image, section)?;
        while let [format, attribute, rest @ ..] = attributes {
            let value = u16::from_le_bytes(*rest.first_chunk()?);
            let rest = &rest[2..];
            let len = if *format == SIZED { usize::from(value) } else { 0 };
            attributes = rest.get(len..)?;
            if *format != SIZED || ![REGISTERS, FRAME, LEAST_STACK].contains(attribute) {
                continue;
            }
            let symbol = symbols.start + 24 * u64::from(word(part(rest, 0)?));
            let name = names.start + u64::from(word(part(image, symbol)?));
            let name = image.get(usize::try_from(name).ok()?..)?;
            let name = name.split(|byte| *byte == 0).next()?;
            let function: &mut CompiledFunction =
                functions.entry(String::from_utf8_lossy(name).into_owned()).or_default();
            let amount = word(part(rest, 4)?);
            match *attribute {
                REGISTERS => function.registers = amount,
                _ => function.local = function.local.max(amount),
            }
        }
    }
    Some(functions)
}

/// A section's type: the symbols, and attributes of all functions.
const SYMBOLS: u32 = 2;
const INFO: u32 = 0x7000_0000;
/// An attribute's format: its length follows.
const SIZED: u8 = 4;
/// Attributes: a symbol, and a number of registers or bytes.
const REGISTERS: u8 = 0x2f;
const FRAME: u8 = 0x11;
const LEAST_STACK: u8 = 0x12;

struct Section {
    kind: u32,
    start: u64,
    len: u64,
    link: u32,
    /// The section that this one describes; 0 for all.
    of: u32,
}

fn sections(image: &[u8]) -> Option<Vec<Section>> {
    let table = u64::from_le_bytes(part(image, 40)?);
    let count = u16::from_le_bytes(part(image, 60)?);
    let section = |number: u16| {
        let at = table + 64 * u64::from(number);
        Some(Section {
            kind: word(part(image, at + 4)?),
            start: u64::from_le_bytes(part(image, at + 24)?),
            len: u64::from_le_bytes(part(image, at + 32)?),
            link: word(part(image, at + 40)?),
            of: word(part(image, at + 44)?),
        })
    };
    (0..count).map(section).collect()
}

fn bytes<'a>(image: &'a [u8], section: &Section) -> Option<&'a [u8]> {
    let start = usize::try_from(section.start).ok()?;
    image.get(start..)?.get(..usize::try_from(section.len).ok()?)
}

fn part<const LEN: usize>(bytes: &[u8], at: u64) -> Option<[u8; LEN]> {
    bytes.get(usize::try_from(at).ok()?..)?.first_chunk().copied()
}

fn word(bytes: [u8; 4]) -> u32 {
    u32::from_le_bytes(bytes)
}
