//! Links that calls make, on the RDMA devices of this machine.

use super::contract::exchange_all;
use super::*;

const LIMIT: Duration = Duration::from_secs(40);

#[test]
fn three_ranks_without_links_exchange_messages_of_all_sizes() {
    on_rails(LIMIT, |rails| {
        let setup = LinkSetup { ranks: 3, planned: false, ..LinkSetup::over(rails, rails.len()) };
        exchange_all(&setup);
    });
}

/// Each rank begins with another peer, and waits for it.
#[test]
fn links_that_ranks_make_in_different_orders_do_not_wait_for_each_other() {
    on_rails(LIMIT, |rails| {
        let setup = LinkSetup { ranks: 3, planned: false, ..LinkSetup::over(rails, 1) };
        let act = |rank: &mut ConnectedRank| {
            let (next, before) = ((rank.me + 1) % 3, (rank.me + 2) % 3);
            let mut memory = HeapMemory::default();
            for (sequence, peer) in [(1, next), (1, before)] {
                rank.verbs.begin_link(peer, sequence)?;
                rank.verbs.announce(peer, &call(sequence))?;
            }
            for peer in [next, before] {
                let (source, destination) = (memory.take(SUBCHUNK), memory.take(SUBCHUNK));
                fill(source, rank.me, 1, 0);
                rank.verbs.send(peer, source)?;
                rank.verbs.post_recv(peer, destination)?;
            }
            let mut events = Events::new();
            let mut received = 0;
            let mut sent = 0;
            while received < 2 || sent < 2 {
                rank.wait(&mut events)?;
                for event in events.drain(..) {
                    received += usize::from(matches!(event, Event::RecvComplete { .. }));
                    sent += usize::from(matches!(event, Event::SendComplete { .. }));
                }
            }
            Ok(())
        };
        for outcome in setup.run(act).expect("all devices work") {
            outcome.expect("no failure");
        }
    });
}
