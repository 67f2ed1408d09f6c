//! Fuzz targets: what a hostile rank writes by RDMA, and the connection data that it publishes.

use super::*;
use crate::transport::verbs::wire::{CALL_BYTES, CTS_BYTES, RECOVERY_BYTES};
use flexring_testkit::fuzzing::{FuzzTarget, InputReader, block};

#[test]
fn writes_of_a_hostile_rank() {
    let write = |kind, epoch, len: usize| {
        let imm = ImmData { kind, epoch }.pack().to_le_bytes();
        [&[3, 0], imm.as_slice(), &(len as u32).to_le_bytes()].concat()
    };
    let words = |at: u16, words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        [&[0], at.to_le_bytes().as_slice(), &block(&bytes)].concat()
    };
    let layout = ControlLayout::example(2);
    let call_at = |offset: usize| words((offset / 8) as u16, &call(1).to_words());
    let seeds = [
        [&[2, 100, 0], call_at(layout.call(1)).as_slice(), &write(ImmKind::Call, 1, CALL_BYTES), &[4]]
            .concat(),
        [&[2, 100, 0], call_at(layout.eager(1, 0)).as_slice(), &write(ImmKind::EagerCall(100), 1, 164), &[4]]
            .concat(),
        [
            &[1, 2, 20],
            words((layout.cts(1, 0) / 8) as u16, &[4096, 4097]).as_slice(),
            &write(ImmKind::Cts(1, 1), 1, CTS_BYTES),
            &[4],
        ]
        .concat(),
        [
            &[2, 2, 20],
            write(ImmKind::Data(0), 1, LONG).as_slice(),
            &write(ImmKind::Eager(1, 8), 1, 0),
            &[4, 5, 0],
        ]
        .concat(),
        [
            words((layout.recovery(0) / 8) as u16, &[1, 1, u64::MAX, 3, 1, u64::MAX, 1]).as_slice(),
            &write(ImmKind::Recovery(0, 0), 0, RECOVERY_BYTES),
            &[5, 0, 4, 6, 4],
        ]
        .concat(),
        [write(ImmKind::Hello(5), 0, 0), write(ImmKind::Goodbye, 0, 0), vec![4, 5, 0, 4]].concat(),
    ];
    let target = FuzzTarget { name: "verbs_writes", longest: 1024, memory: 1 << 20 };
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let mut ends = TwoEnds::new(2);
        ends.begin_at(0, 1);
        let (mut sent, mut posted, mut completed, mut entered) = (0usize, 0usize, 0usize, 0usize);
        while !reader.is_empty() {
            let outcome = match reader.byte() % 8 {
                0 => {
                    let start = 8 * (usize::from(reader.byte()) | usize::from(reader.byte()) << 8);
                    let bytes = reader.block();
                    let start = start % ends.remote[0].len();
                    let len = bytes.len().min(ends.remote[0].len() - start);
                    let to = ends.remote[0].narrow(start, len);
                    // SAFETY: `to` has this length and belongs to the test.
                    unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), len) };
                    Ok(())
                }
                kind @ (1 | 2) => {
                    let len = 1 + (usize::from(reader.byte()) | usize::from(reader.byte()) << 8) % (2 * LONG);
                    if kind == 1 && sent < 8 {
                        sent += 1;
                        ends.try_send(0, 1, len)
                    } else if kind == 2 && posted < 8 {
                        posted += 1;
                        ends.try_post_recv(0, len).map(drop)
                    } else {
                        Ok(())
                    }
                }
                3 => {
                    let qp = reader.below(2);
                    let word = reader.word();
                    ends.links[0].received(qp, word as u32, (word >> 32) as u32).map(drop)
                }
                4 => {
                    let mut events = Events::new();
                    let outcome = ends.links[0].report(&mut events);
                    for event in events {
                        match event {
                            Event::RecvComplete { peer: 1 } => completed += 1,
                            Event::PeerEntered { peer: 1, .. } => entered += 1,
                            Event::SendComplete { peer: 1 } => {}
                            event => panic!("{event:?}"),
                        }
                    }
                    assert!(
                        completed <= posted && entered <= 1,
                        "{completed} of {posted}, {entered} entries"
                    );
                    outcome.and_then(|()| ends.links[0].next_request().map(drop))
                }
                5 => {
                    let qp = reader.below(2);
                    ends.break_end(0, qp);
                    Ok(())
                }
                6 => {
                    ends.break_other_ends(0);
                    ends.links[0].recover();
                    Ok(())
                }
                _ => ends.links[0].check(),
            };
            if let Err(error) = outcome {
                assert!(matches!(error.kind(), ErrorKind::Disagreement | ErrorKind::PeerLost), "{error}");
                return;
            }
            if ends.links[0].check().is_err() {
                return;
            }
        }
    });
}
