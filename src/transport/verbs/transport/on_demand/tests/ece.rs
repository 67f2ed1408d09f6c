//! Both ends of a queue pair have the ECE options that both devices support, and none if one of them has no
//! ECE.

use super::*;
use crate::transport::verbs::objects::EceOptions;
use rustix::io::Errno;

/// Devices of this vendor with these options.
fn device(vendor_id: u32, options: u32) -> Shim {
    Shim::none().with_ece(Some(EceOptions { vendor_id, options, comp_mask: 0 }))
}

/// By rank, and by queue pair of the link between two ranks with these devices: the options in use. The link
/// is planned, or a call makes it.
fn agreed(shims: &[Shim; 2], planned: bool) -> [Vec<Option<u32>>; 2] {
    let peers = |me: Rank| if planned { vec![1 - me] } else { Vec::new() };
    let (ranks, _) = try_world(2, 2, peers, |me| shims[me].clone()).expect("inert");
    let mut ranks: Vec<Verbs> = ranks.into_iter().map(|rank| rank.expect("inert")).collect();
    if !planned {
        enter(&mut ranks[1], 0);
        for me in [0, 1, 0, 1] {
            poll(&mut ranks[me]).expect("no failure");
        }
    }
    assert!(ranks.iter().all(|verbs| verbs.peers[0].is_ready()), "both ends are connected");
    let of_rank = |me: Rank| ranks[me].peers[0].ece().iter().map(|ece| ece.map(|ece| ece.options)).collect();
    let agreed = [of_rank(0), of_rank(1)];
    finish(ranks);
    agreed
}

#[test]
fn both_ends_use_the_options_that_both_support() {
    for planned in [true, false] {
        let shims = [device(7, 0b0111), device(7, 0b1110)];
        let [mine, theirs] = agreed(&shims, planned);
        assert_eq!(mine, [Some(0b0110); 2], "planned: {planned}");
        assert_eq!(theirs, mine);
        assert!(shims.iter().all(|shim| shim.calls(Verb::SetEce) == 2), "once for each queue pair");
    }
}

#[test]
fn no_end_uses_options_that_the_other_cannot_have() {
    let none = Shim::none;
    for planned in [true, false] {
        for shims in
            [[device(7, 3), none()], [none(), device(7, 3)], [none(), none()], [device(7, 3), device(8, 3)]]
        {
            assert_eq!(agreed(&shims, planned), [vec![], vec![]]);
            assert!(shims.iter().all(|shim| shim.calls(Verb::SetEce) == 0));
        }
    }
}

#[test]
fn a_queue_pair_whose_driver_has_no_ece_uses_none() {
    for planned in [true, false] {
        for (verb, errno) in [
            (Verb::QueryEce, Errno::OPNOTSUPP),
            (Verb::QueryEce, Errno::NOSYS),
            (Verb::SetEce, Errno::OPNOTSUPP),
        ] {
            let ece = EceOptions { vendor_id: 7, options: 3, comp_mask: 0 };
            let first_fails = Shim::failing(verb, 0, errno.raw_os_error()).with_ece(Some(ece));
            let expected = vec![None, Some(3)];
            assert_eq!(
                agreed(&[first_fails, device(7, 3)], planned),
                [expected.clone(), expected],
                "{verb:?}"
            );
        }
    }
}

#[test]
fn an_end_that_cannot_be_connected_keeps_no_other_waiting() {
    let ece = Some(EceOptions { vendor_id: 7, options: 3, comp_mask: 0 });
    let shims = [Shim::failing(Verb::SetEce, 1, Errno::INVAL.raw_os_error()).with_ece(ece), device(7, 3)];
    let (mut ranks, _) = try_world(2, 2, |me| vec![1 - me], |me| shims[me].clone()).expect("inert");
    let other = ranks.pop().expect("two ranks").expect("its own devices work");
    let Some(Err(error)) = ranks.pop() else { panic!("its device refuses the options") };
    assert_eq!(error.kind(), ErrorKind::System);
    assert!(error.message().contains("ibv_set_ece failed on inert1 port 1 for rank 1"), "{error}");
    assert_eq!(other.peers[0].ece(), []);
    finish(vec![other]);
}
