//! The choice of every GDR mode, with scripted answers of drivers and devices.

use super::*;

use crate::error::ErrorKind;
use std::cell::RefCell;

/// Scripted answers. `asked` records the queries.
struct FakeTarget {
    exports: bool,
    /// The errno from registering a DMA-BUF that does not exist.
    device: Errno,
    dmabuf: Result<(), DmabufError>,
    address: Result<(), Errno>,
    asked: RefCell<Vec<&'static str>>,
}

impl GdrSupport for FakeTarget {
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

impl GdrTarget for FakeTarget {
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

/// A target on which every mode is available.
fn target() -> FakeTarget {
    FakeTarget {
        exports: true,
        device: Errno::BADF,
        dmabuf: Ok(()),
        address: Ok(()),
        asked: RefCell::default(),
    }
}

fn refused(errno: Errno) -> Result<(), DmabufError> {
    Err(DmabufError::Register(errno.raw_os_error()))
}

/// The result of `auto`: the mode, why each better one was rejected, and the queries.
fn automatic(target: &FakeTarget) -> (GdrMode, Vec<String>, Vec<&'static str>) {
    let registration = register(GpuDirect::Auto, target).expect("auto never fails");
    assert_eq!(registration.region, (registration.mode != GdrMode::HostStaging).then_some(registration.mode));
    let modes: Vec<_> = registration.rejected.iter().map(|rejected| rejected.mode).collect();
    assert_eq!(modes, GdrMode::ALL[..modes.len()], "all better modes, the best first");
    let why = registration.rejected.iter().map(|rejected| rejected.reason.to_string()).collect();
    (registration.mode, why, target.asked.take())
}

#[test]
fn auto_uses_the_first_available_mode_and_makes_no_further_queries() {
    let no_module = "no kernel module resolves GPU addresses for the RDMA core; fix: modprobe nvidia-peermem";
    let no_room = format!("the GPU's BAR has no room for this range; fix: {BAR}");
    let does_not_import = "the driver of mlx5_0 does not import DMA-BUFs; fix: use a driver that does, such as mlx5_ib of \
                      Linux 5.12 or newer";
    let not_exported =
        "the GPU's driver does not export this memory: invalid argument; fix: use memory from cudaMalloc";
    type Case<'a> = (FakeTarget, GdrMode, Vec<&'a str>, &'a [&'a str]);
    let cases: Vec<Case<'_>> = vec![
        (target(), GdrMode::DmaBuf, vec![], &["exports", "device", "dmabuf"]),
        // An unclear answer leads to an attempt.
        (
            FakeTarget { device: Errno::INVAL, ..target() },
            GdrMode::DmaBuf,
            vec![],
            &["exports", "device", "dmabuf"],
        ),
        (
            FakeTarget { exports: false, ..target() },
            GdrMode::PeerMem,
            vec!["it exports nothing"],
            &["exports", "address"],
        ),
        (
            FakeTarget { device: Errno::OPNOTSUPP, ..target() },
            GdrMode::PeerMem,
            vec![does_not_import],
            &["exports", "device", "address"],
        ),
        (
            FakeTarget { device: Errno::PROTONOSUPPORT, ..target() },
            GdrMode::PeerMem,
            vec!["the kernel does not register DMA-BUFs with mlx5_0; fix: boot Linux 5.12 or newer"],
            &["exports", "device", "address"],
        ),
        (
            FakeTarget { dmabuf: Err(DmabufError::Export("invalid argument".to_owned())), ..target() },
            GdrMode::PeerMem,
            vec![not_exported],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            FakeTarget { dmabuf: refused(Errno::NOMEM), ..target() },
            GdrMode::PeerMem,
            vec![&no_room],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            FakeTarget { dmabuf: refused(Errno::INVAL), ..target() },
            GdrMode::PeerMem,
            vec!["ibv_reg_dmabuf_mr failed: Invalid argument (os error 22)"],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            FakeTarget { exports: false, address: Err(Errno::FAULT), ..target() },
            GdrMode::HostStaging,
            vec!["it exports nothing", no_module],
            &["exports", "address"],
        ),
        (
            FakeTarget { dmabuf: refused(Errno::NOMEM), address: Err(Errno::NOMEM), ..target() },
            GdrMode::HostStaging,
            vec![&no_room, &no_room],
            &["exports", "device", "dmabuf", "address"],
        ),
        (
            FakeTarget { exports: false, address: Err(Errno::PERM), ..target() },
            GdrMode::HostStaging,
            vec!["it exports nothing", "ibv_reg_mr failed: Operation not permitted (os error 1)"],
            &["exports", "address"],
        ),
    ];
    for (number, (target, mode, why, asked)) in cases.into_iter().enumerate() {
        let (mode_used, rejected, questions) = automatic(&target);
        assert_eq!((mode_used, questions.as_slice()), (mode, asked), "case {number}: {rejected:?}");
        assert_eq!(rejected, why, "case {number}");
    }
}

#[test]
fn a_required_mode_is_used_or_an_error_says_why_not() {
    let error = |asked, target: FakeTarget| {
        let error = register(asked, &target).expect_err("the mode is not available");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        (error.message().to_owned(), target.asked.take())
    };
    let registration = register(GpuDirect::Dmabuf, &target()).expect("every mode is available");
    assert_eq!((registration.mode, registration.rejected), (GdrMode::DmaBuf, vec![]));
    let (message, asked) = error(GpuDirect::Dmabuf, FakeTarget { dmabuf: refused(Errno::NOMEM), ..target() });
    assert!(
        message.starts_with("FLEXRING_GPU_DIRECT=dmabuf is not possible: the GPU's BAR has no room"),
        "{message}"
    );
    assert_eq!(asked, ["exports", "device", "dmabuf"], "peer memory is not tried");
    let (message, _) = error(GpuDirect::Dmabuf, FakeTarget { device: Errno::OPNOTSUPP, ..target() });
    assert!(
        message.contains("is not possible: the driver of mlx5_0 does not import DMA-BUFs; fix: "),
        "{message}"
    );
    let (message, asked) = error(GpuDirect::Peer, FakeTarget { address: Err(Errno::FAULT), ..target() });
    assert!(message.ends_with("for the RDMA core; fix: modprobe nvidia-peermem"), "{message}");
    assert_eq!(asked, ["address"], "no query about DMA-BUFs");
}

#[test]
fn there_are_no_queries_about_modes_that_the_setting_excludes() {
    let excluded = |mode, setting: &str| RejectedMode {
        mode,
        reason: GdrUnavailable {
            message: format!("FLEXRING_GPU_DIRECT={setting} excludes it"),
            fix: None,
            by_setting: true,
        },
    };
    let target = target();
    let peer = register(GpuDirect::Peer, &target).expect("every mode is available");
    assert_eq!((peer.mode, peer.rejected), (GdrMode::PeerMem, vec![excluded(GdrMode::DmaBuf, "peer")]));
    assert_eq!(target.asked.take(), ["address"]);
    let off = register(GpuDirect::Off, &target).expect("it needs nothing");
    assert_eq!((off.mode, off.region), (GdrMode::HostStaging, None));
    assert_eq!(off.rejected, [excluded(GdrMode::DmaBuf, "off"), excluded(GdrMode::PeerMem, "off")]);
    assert!(target.asked.take().is_empty());
}

#[test]
fn a_refusal_does_not_affect_the_next_range() {
    let large = FakeTarget { dmabuf: refused(Errno::NOMEM), ..target() };
    assert_eq!(automatic(&large).0, GdrMode::PeerMem);
    let small = FakeTarget { dmabuf: Ok(()), ..large };
    assert_eq!(automatic(&small).0, GdrMode::DmaBuf);
}

#[test]
fn availability_is_reported_without_registering() {
    let target = FakeTarget { device: Errno::OPNOTSUPP, ..target() };
    let available = GdrMode::ALL.map(|mode| mode.availability(GpuDirect::Auto, &target).is_ok());
    assert_eq!(available, [false, true, true]);
    assert_eq!(target.asked.take(), ["exports", "device"]);
    assert!(
        GdrMode::DmaBuf < GdrMode::PeerMem && GdrMode::PeerMem < GdrMode::HostStaging,
        "the worst mode is the largest"
    );
}
