//! The name of this node. Ranks whose nodes have equal names can share memory.

use crate::config::Config;

/// The name of this process's node: `FLEXRING_NODE` if it is set, else an identifier of kernel, network
/// namespace and user.
///
/// Two containers on one machine have their own network namespaces and mostly cannot open each other's
/// memory, so they count as two nodes. So do two users.
#[must_use]
pub fn node_name(config: &Config) -> String {
    if let Some(name) = &config.node {
        return name.clone();
    }
    // Some sandboxes hide the boot id; the host name replaces it.
    let kernel = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| host_name(), |id| id.trim().to_owned());
    let network = rustix::fs::stat("/proc/self/ns/net").map_or(0, |namespace| namespace.st_ino);
    let user = rustix::process::geteuid().as_raw();
    format!("{kernel}/net:{network}/uid:{user}")
}

/// The host's name, as `uname -n` prints it.
#[must_use]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_name_is_stable_and_can_be_set() {
        let config = Config::default();
        assert_eq!(node_name(&config), node_name(&config));
        assert!(node_name(&config).contains("/net:"));
        assert!(!host_name().is_empty());
        let named = Config { node: Some("left".to_owned()), ..config };
        assert_eq!(node_name(&named), "left");
    }
}
