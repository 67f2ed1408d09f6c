//! Every way down the ladder, by answers that nobody had to give.

use super::*;

use crate::error::ErrorKind;
use std::cell::RefCell;

/// What is answered; what is not asked is not in `asked`.
struct Answers {
    exports: bool,
    /// The errno to a DMA-BUF that does not exist.
    device: Errno,
    dmabuf: Result<(), DmabufError>,
    address: Result<(), Errno>,
    asked: RefCell<Vec<&'static str>>,
}

impl GdrSupport for Answers {
    fn exports_dmabuf(&self) -> Result<(), GdrUnavailable> {
        self.asked.borrow_mut().push("exports");
        if self.exports { Ok(()) } else { Err(GdrUnavailable::new("it exports nothing")) }
    }

    fn nic_imports_dmabuf(&self) -> Result<(), GdrUnavailable> {
        self.asked.borrow_mut().push("device");
        dmabuf_support("mlx5_0", self.device.raw_os_error())
    }

    fn nic_supports_peermem(&self) -> Result<(), GdrUnavailable> {
        Ok(())
    }
}

impl GdrTarget for Answers {
    type Registered = GdrMode;

    fn register_dmabuf(&self) -> Result<GdrMode, DmabufError> {
        self.asked.borrow_mut().push("dmabuf");
        self.dmabuf.clone().map(|()| GdrMode::DmaBuf)
    }

    fn register_peermem(&self) -> Result<GdrMode, i32> {
        self.asked.borrow_mut().push("address");
        self.address.map(|()| GdrMode::PeerMem).map_err(Errno::raw_os_error)
    }
}

/// Everything works.
fn answers() -> Answers {
    Answers { exports: true, device: Errno::BADF, dmabuf: Ok(()), address: Ok(()), asked: RefCell::default() }
}

fn refused(errno: Errno) -> Result<(), DmabufError> {
    Err(DmabufError::Register(errno.raw_os_error()))
}

/// What comes of `auto`: the rung, why each one above it was left, and what was asked on the way.
fn descent(answers: &Answers) -> (GdrMode, Vec<String>, Vec<&'static str>) {
    let taken = register(GpuDirect::Auto, answers).expect("auto never fails");
    assert_eq!(taken.region, (taken.mode != GdrMode::HostStaging).then_some(taken.mode));
    let rungs: Vec<_> = taken.rejected.iter().map(|rejected| rejected.mode).collect();
    assert_eq!(rungs, GdrMode::ALL[..rungs.len()], "all above it, the best first");
    let why = taken.rejected.iter().map(|rejected| rejected.reason.sentence()).collect();
    (taken.mode, why, answers.asked.take())
}

#[test]
fn auto_takes_the_first_rung_that_works_and_asks_no_further() {
    let no_module = "no module tells the kernel's RDMA core of GPU memory; fix: modprobe nvidia-peermem";
    let no_room = format!("the GPU's BAR has no room for this range; fix: {BAR}");
    let takes_none = "the driver of mlx5_0 takes no DMA-BUF; fix: use a driver of it that does, as mlx5_ib of \
                      Linux 5.12 or newer";
    let unexported =
        "the GPU's driver does not export this memory: invalid argument; fix: use memory of cudaMalloc";
    type Case<'a> = (Answers, GdrMode, Vec<&'a str>, &'a [&'a str]);
    let cases: Vec<Case<'_>> = vec![
        (answers(), GdrMode::DmaBuf, vec![], &["exports", "device", "dmabuf"]),
        // An answer that is neither yes nor no is a reason to try.
        (
            Answers { device: Errno::INVAL, ..answers() },
            GdrMode::DmaBuf,
            vec![],
            &["exports", "device", "dmabuf"],
        ),
        (
            Answers { exports: false, ..answers() },
            GdrMode::PeerMem,
            vec!["it exports nothing"],
            &["exports", "address"],
        ),
        (
            Answers { device: Errno::OPNOTSUPP, ..answers() },
            GdrMode::PeerMem,
            vec![takes_none],
            &["exports", "device", "address"],
        ),
        (
            Answers { device: Errno::PROTONOSUPPORT, ..answers() },
            GdrMode::PeerMem,
            vec!["the kernel registers no DMA-BUF with mlx5_0; fix: boot Linux 5.12 or newer"],
            &["exports", "device", "address"],
        ),
        (
            Answers { dmabuf: Err(DmabufError::Export("invalid argument".to_owned())), ..answers() },
            GdrMode::PeerMem,
            vec![unexported],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            Answers { dmabuf: refused(Errno::NOMEM), ..answers() },
            GdrMode::PeerMem,
            vec![&no_room],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            Answers { dmabuf: refused(Errno::INVAL), ..answers() },
            GdrMode::PeerMem,
            vec!["ibv_reg_dmabuf_mr failed: Invalid argument (os error 22)"],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            Answers { exports: false, address: Err(Errno::FAULT), ..answers() },
            GdrMode::HostStaging,
            vec!["it exports nothing", no_module],
            &["exports", "address"],
        ),
        (
            Answers { dmabuf: refused(Errno::NOMEM), address: Err(Errno::NOMEM), ..answers() },
            GdrMode::HostStaging,
            vec![&no_room, &no_room],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            Answers { exports: false, address: Err(Errno::PERM), ..answers() },
            GdrMode::HostStaging,
            vec!["it exports nothing", "ibv_reg_mr failed: Operation not permitted (os error 1)"],
            &["exports", "address"],
        ),
    ];
    for (number, (answers, mode, why, asked)) in cases.into_iter().enumerate() {
        let (took, rejected, questions) = descent(&answers);
        assert_eq!((took, questions.as_slice()), (mode, asked), "case {number}: {rejected:?}");
        assert_eq!(rejected, why, "case {number}");
    }
}

#[test]
fn a_rung_that_is_named_is_had_or_an_error_says_why_not() {
    let error = |asked, answers: Answers| {
        let error = register(asked, &answers).expect_err("it cannot be had");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        (error.message().to_owned(), answers.asked.take())
    };
    let taken = register(GpuDirect::Dmabuf, &answers()).expect("it works");
    assert_eq!((taken.mode, taken.rejected), (GdrMode::DmaBuf, vec![]));
    let (words, asked) = error(GpuDirect::Dmabuf, Answers { dmabuf: refused(Errno::NOMEM), ..answers() });
    assert!(
        words.starts_with("FLEXRING_GPU_DIRECT=dmabuf is not possible: the GPU's BAR has no room"),
        "{words}"
    );
    assert_eq!(asked, ["exports", "device", "dmabuf"], "peer memory is not tried");
    let (words, _) = error(GpuDirect::Dmabuf, Answers { device: Errno::OPNOTSUPP, ..answers() });
    assert!(words.contains("is not possible: the driver of mlx5_0 takes no DMA-BUF; fix: "), "{words}");
    let (words, asked) = error(GpuDirect::Peer, Answers { address: Err(Errno::FAULT), ..answers() });
    assert!(words.ends_with("of GPU memory; fix: modprobe nvidia-peermem"), "{words}");
    assert_eq!(asked, ["address"], "nobody is asked about DMA-BUFs");
}

#[test]
fn what_a_setting_rules_out_is_left_unasked() {
    let ruled_out = |mode, setting: &str| RejectedMode {
        mode,
        reason: GdrUnavailable {
            message: format!("FLEXRING_GPU_DIRECT={setting} rules it out"),
            fix: None,
            by_setting: true,
        },
    };
    let answers = answers();
    let peer = register(GpuDirect::Peer, &answers).expect("it works");
    assert_eq!((peer.mode, peer.rejected), (GdrMode::PeerMem, vec![ruled_out(GdrMode::DmaBuf, "peer")]));
    assert_eq!(answers.asked.take(), ["address"]);
    let off = register(GpuDirect::Off, &answers).expect("it needs nothing");
    assert_eq!((off.mode, off.region), (GdrMode::HostStaging, None));
    assert_eq!(off.rejected, [ruled_out(GdrMode::DmaBuf, "off"), ruled_out(GdrMode::PeerMem, "off")]);
    assert!(answers.asked.take().is_empty());
}

#[test]
fn what_one_range_was_refused_is_not_held_against_the_next() {
    let large = Answers { dmabuf: refused(Errno::NOMEM), ..answers() };
    assert_eq!(descent(&large).0, GdrMode::PeerMem);
    let small = Answers { dmabuf: Ok(()), ..large };
    assert_eq!(descent(&small).0, GdrMode::DmaBuf);
}

#[test]
fn prospects_are_told_without_registering_anything() {
    let answers = Answers { device: Errno::OPNOTSUPP, ..answers() };
    let told = GdrMode::ALL.map(|mode| mode.availability(GpuDirect::Auto, &answers).is_ok());
    assert_eq!(told, [false, true, true]);
    assert_eq!(answers.asked.take(), ["exports", "device"]);
    assert!(
        GdrMode::DmaBuf < GdrMode::PeerMem && GdrMode::PeerMem < GdrMode::HostStaging,
        "the worst of several is the largest"
    );
}
