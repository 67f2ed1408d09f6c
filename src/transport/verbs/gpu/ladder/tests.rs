//! Every way down the ladder, by answers that nobody had to give.

use super::*;
use std::cell::RefCell;

/// What is answered; what is not asked is not in `asked`.
struct Answers {
    exports: bool,
    /// The errno to a DMA-BUF that does not exist.
    device: Errno,
    dmabuf: Result<(), Refusal>,
    address: Result<(), Errno>,
    asked: RefCell<Vec<&'static str>>,
}

impl Prospects for Answers {
    fn exports(&self) -> Result<(), Reason> {
        self.asked.borrow_mut().push("exports");
        if self.exports { Ok(()) } else { Err(Reason::of("it exports nothing")) }
    }

    fn takes_dmabufs(&self) -> Result<(), Reason> {
        self.asked.borrow_mut().push("device");
        dmabuf_answer("mlx5_0", self.device.raw_os_error())
    }

    fn takes_addresses(&self) -> Result<(), Reason> {
        Ok(())
    }
}

impl Range for Answers {
    type Region = Rung;

    fn by_dmabuf(&self) -> Result<Rung, Refusal> {
        self.asked.borrow_mut().push("dmabuf");
        self.dmabuf.clone().map(|()| Rung::Dmabuf)
    }

    fn by_address(&self) -> Result<Rung, i32> {
        self.asked.borrow_mut().push("address");
        self.address.map(|()| Rung::Peer).map_err(Errno::raw_os_error)
    }
}

/// Everything works.
fn answers() -> Answers {
    Answers { exports: true, device: Errno::BADF, dmabuf: Ok(()), address: Ok(()), asked: RefCell::default() }
}

fn refused(errno: Errno) -> Result<(), Refusal> {
    Err(Refusal::Register(errno.raw_os_error()))
}

/// What comes of `auto`: the rung, why each one above it was left, and what was asked on the way.
fn descent(answers: &Answers) -> (Rung, Vec<String>, Vec<&'static str>) {
    let taken = take(GpuDirect::Auto, answers).expect("auto never fails");
    assert_eq!(taken.region, (taken.rung != Rung::Host).then_some(taken.rung));
    let rungs: Vec<_> = taken.left.iter().map(|left| left.rung).collect();
    assert_eq!(rungs, Rung::ALL[..rungs.len()], "all above it, the best first");
    let why = taken.left.iter().map(|left| left.reason.sentence()).collect();
    (taken.rung, why, answers.asked.take())
}

#[test]
fn auto_takes_the_first_rung_that_works_and_asks_no_further() {
    let no_module = "no module tells the kernel's RDMA core of GPU memory; mend: modprobe nvidia-peermem";
    let no_room = format!("the GPU's BAR has no room for this range; mend: {BAR}");
    let takes_none = "the driver of mlx5_0 takes no DMA-BUF; mend: use a driver of it that does, as mlx5_ib of \
                      Linux 5.12 or newer";
    let unexported =
        "the GPU's driver does not export this memory: invalid argument; mend: use memory of cudaMalloc";
    type Case<'a> = (Answers, Rung, Vec<&'a str>, &'a [&'a str]);
    let cases: Vec<Case<'_>> = vec![
        (answers(), Rung::Dmabuf, vec![], &["exports", "device", "dmabuf"]),
        // An answer that is neither yes nor no is a reason to try.
        (
            Answers { device: Errno::INVAL, ..answers() },
            Rung::Dmabuf,
            vec![],
            &["exports", "device", "dmabuf"],
        ),
        (
            Answers { exports: false, ..answers() },
            Rung::Peer,
            vec!["it exports nothing"],
            &["exports", "address"],
        ),
        (
            Answers { device: Errno::OPNOTSUPP, ..answers() },
            Rung::Peer,
            vec![takes_none],
            &["exports", "device", "address"],
        ),
        (
            Answers { device: Errno::PROTONOSUPPORT, ..answers() },
            Rung::Peer,
            vec!["the kernel registers no DMA-BUF with mlx5_0; mend: boot Linux 5.12 or newer"],
            &["exports", "device", "address"],
        ),
        (
            Answers { dmabuf: Err(Refusal::Export("invalid argument".to_owned())), ..answers() },
            Rung::Peer,
            vec![unexported],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            Answers { dmabuf: refused(Errno::NOMEM), ..answers() },
            Rung::Peer,
            vec![&no_room],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            Answers { dmabuf: refused(Errno::INVAL), ..answers() },
            Rung::Peer,
            vec!["ibv_reg_dmabuf_mr failed: Invalid argument (os error 22)"],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            Answers { exports: false, address: Err(Errno::FAULT), ..answers() },
            Rung::Host,
            vec!["it exports nothing", no_module],
            &["exports", "address"],
        ),
        (
            Answers { dmabuf: refused(Errno::NOMEM), address: Err(Errno::NOMEM), ..answers() },
            Rung::Host,
            vec![&no_room, &no_room],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            Answers { exports: false, address: Err(Errno::PERM), ..answers() },
            Rung::Host,
            vec!["it exports nothing", "ibv_reg_mr failed: Operation not permitted (os error 1)"],
            &["exports", "address"],
        ),
    ];
    for (number, (answers, rung, why, asked)) in cases.into_iter().enumerate() {
        let (took, left, questions) = descent(&answers);
        assert_eq!((took, questions.as_slice()), (rung, asked), "case {number}: {left:?}");
        assert_eq!(left, why, "case {number}");
    }
}

#[test]
fn a_rung_that_is_named_is_had_or_an_error_says_why_not() {
    let error = |asked, answers: Answers| {
        let error = take(asked, &answers).expect_err("it cannot be had");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        (error.message().to_owned(), answers.asked.take())
    };
    let taken = take(GpuDirect::Dmabuf, &answers()).expect("it works");
    assert_eq!((taken.rung, taken.left), (Rung::Dmabuf, vec![]));
    let (words, asked) = error(GpuDirect::Dmabuf, Answers { dmabuf: refused(Errno::NOMEM), ..answers() });
    assert!(
        words.starts_with("FLEXRING_GPU_DIRECT=dmabuf is not possible: the GPU's BAR has no room"),
        "{words}"
    );
    assert_eq!(asked, ["exports", "device", "dmabuf"], "peer memory is not tried");
    let (words, _) = error(GpuDirect::Dmabuf, Answers { device: Errno::OPNOTSUPP, ..answers() });
    assert!(words.contains("is not possible: the driver of mlx5_0 takes no DMA-BUF; mend: "), "{words}");
    let (words, asked) = error(GpuDirect::Peer, Answers { address: Err(Errno::FAULT), ..answers() });
    assert!(words.ends_with("of GPU memory; mend: modprobe nvidia-peermem"), "{words}");
    assert_eq!(asked, ["address"], "nobody is asked about DMA-BUFs");
}

#[test]
fn what_a_setting_rules_out_is_left_unasked() {
    let ruled_out = |rung, setting: &str| Left {
        rung,
        reason: Reason {
            words: format!("FLEXRING_GPU_DIRECT={setting} rules it out"),
            mend: None,
            by_setting: true,
        },
    };
    let answers = answers();
    let peer = take(GpuDirect::Peer, &answers).expect("it works");
    assert_eq!((peer.rung, peer.left), (Rung::Peer, vec![ruled_out(Rung::Dmabuf, "peer")]));
    assert_eq!(answers.asked.take(), ["address"]);
    let off = take(GpuDirect::Off, &answers).expect("it needs nothing");
    assert_eq!((off.rung, off.region), (Rung::Host, None));
    assert_eq!(off.left, [ruled_out(Rung::Dmabuf, "off"), ruled_out(Rung::Peer, "off")]);
    assert!(answers.asked.take().is_empty());
}

#[test]
fn what_one_range_was_refused_is_not_held_against_the_next() {
    let large = Answers { dmabuf: refused(Errno::NOMEM), ..answers() };
    assert_eq!(descent(&large).0, Rung::Peer);
    let small = Answers { dmabuf: Ok(()), ..large };
    assert_eq!(descent(&small).0, Rung::Dmabuf);
}

#[test]
fn prospects_are_told_without_registering_anything() {
    let answers = Answers { device: Errno::OPNOTSUPP, ..answers() };
    let told = Rung::ALL.map(|rung| rung.prospect(GpuDirect::Auto, &answers).is_ok());
    assert_eq!(told, [false, true, true]);
    assert_eq!(answers.asked.take(), ["exports", "device"]);
    assert!(Rung::Dmabuf < Rung::Peer && Rung::Peer < Rung::Host, "the worst of several is the largest");
}
