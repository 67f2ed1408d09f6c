//! The names of verbs, and the error of a verb that failed: verb, device, port, peer, cause and fix.

use crate::error::Error;
use crate::rank::Rank;
use rustix::io::Errno;
use std::fmt;

/// Defines [`Verb`] from its variants and their names.
macro_rules! verbs {
    ($($variant:ident = $name:literal,)*) => {
        /// The verbs that flexring calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Verb {
            $($variant,)*
        }

        impl Verb {
            /// All verbs.
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The function of libibverbs, with the new state for `ibv_modify_qp`.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

verbs! {
    GetDeviceList = "ibv_get_device_list",
    ForkInit = "ibv_fork_init",
    OpenDevice = "ibv_open_device",
    QueryPort = "ibv_query_port",
    AllocPd = "ibv_alloc_pd",
    RegMr = "ibv_reg_mr",
    RegDmabufMr = "ibv_reg_dmabuf_mr",
    CreateCompChannel = "ibv_create_comp_channel",
    CreateCq = "ibv_create_cq",
    ReqNotifyCq = "ibv_req_notify_cq",
    PollCq = "ibv_poll_cq",
    CreateQp = "ibv_create_qp",
    ModifyQpToInit = "ibv_modify_qp to INIT",
    ModifyQpToRtr = "ibv_modify_qp to RTR",
    ModifyQpToRts = "ibv_modify_qp to RTS",
    ModifyQpToErr = "ibv_modify_qp to ERR",
    ModifyQpToReset = "ibv_modify_qp to RESET",
    PostSend = "ibv_post_send",
    PostRecv = "ibv_post_recv",
}

impl Verb {
    /// The most likely fix, if one is known.
    fn fix(self, errno: i32) -> Option<&'static str> {
        let (nomem, access) = (Errno::NOMEM.raw_os_error(), Errno::ACCESS.raw_os_error());
        let (perm, timed_out) = (Errno::PERM.raw_os_error(), Errno::TIMEDOUT.raw_os_error());
        match self {
            Self::RegMr | Self::CreateCq | Self::CreateQp if errno == nomem => {
                Some("the memlock limit is too low: raise it (ulimit -l unlimited)")
            }
            Self::ForkInit if errno == Errno::INVAL.raw_os_error() => Some(
                "another library of this process has registered memory, and this kernel would not protect it when the \
                 process forks: set RDMAV_FORK_SAFE=1",
            ),
            Self::OpenDevice if errno == access || errno == perm => {
                Some("this user has no permission to open /dev/infiniband/uverbs*")
            }
            Self::ModifyQpToRtr if errno == timed_out => Some(
                "the peer's address could not be resolved: check that its interface is reachable from this one",
            ),
            Self::CreateQp if errno == Errno::OPNOTSUPP.raw_os_error() => {
                Some("the device has no reliable connections: exclude it in FLEXRING_IB_HCA (^NAME)")
            }
            Self::CreateQp | Self::CreateCq if errno == Errno::INVAL.raw_os_error() => {
                Some("if that is more than the device allows, exclude it in FLEXRING_IB_HCA (^NAME)")
            }
            _ => None,
        }
    }
}

/// The context of a call, for error messages. What is unknown is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallSite {
    pub device: String,
    pub port: Option<u8>,
    pub peer: Option<Rank>,
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "on {}", self.device)?;
        if let Some(port) = self.port {
            write!(f, " port {port}")?;
        }
        match self.peer {
            Some(peer) => write!(f, " for rank {peer}"),
            None => Ok(()),
        }
    }
}

/// The error of a verb that failed with `errno`. It blames the peer, if one is known.
pub(crate) fn failed(verb: Verb, site: &CallSite, errno: i32) -> Error {
    let cause = std::io::Error::from_raw_os_error(errno);
    let fix = verb.fix(errno).map(|fix| format!("; {fix}")).unwrap_or_default();
    let error = Error::system(format!("{} failed {site}: {cause}{fix}", verb.name())).with_source(cause);
    match site.peer {
        Some(peer) => error.with_suspect(peer),
        None => error,
    }
}

/// The current `errno`, for verbs that return a null pointer on failure.
pub(super) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_verb_device_port_peer_cause_and_fix() {
        let site = CallSite { device: "mlx5_0".to_owned(), port: Some(1), peer: Some(3) };
        let message = failed(Verb::CreateQp, &site, Errno::NOMEM.raw_os_error()).to_string();
        assert!(
            message.starts_with("system error: ibv_create_qp failed on mlx5_0 port 1 for rank 3: Cannot"),
            "{message}"
        );
        assert!(message.ends_with("(ulimit -l unlimited)"), "{message}");
    }

    #[test]
    fn verb_names_are_distinct() {
        let names: std::collections::BTreeSet<_> = Verb::ALL.iter().map(|verb| verb.name()).collect();
        assert_eq!(names.len(), Verb::ALL.len());
    }
}
