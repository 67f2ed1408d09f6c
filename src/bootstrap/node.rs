//! The name of this node. Ranks whose nodes have equal names can share memory.

use crate::config::Config;

/// The name of this process's node: `FLEXRING_NODE` if it is set, else an identifier of kernel, network
/// namespace and user.
///
/// Ranks with equal names share memory, which the kernel allows if both have the same user. Two containers on
/// one machine mostly have their own network namespaces, or user namespaces that stand for different users of
/// the machine. Then they count as two nodes, as two users do. Containers that have these in common, and
/// differ in their PID namespaces for example, share memory.
#[must_use]
pub fn node_name(config: &Config) -> String {
    if let Some(name) = &config.node {
        return name.clone();
    }
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let user = rustix::process::geteuid().as_raw();
    let user = match user_outside(&map, user) {
        Some(outside) => outside.to_string(),
        // It is one of several that the namespace does not map.
        None => format!("{user}@{}", namespace("user")),
    };
    format!("{}/net:{}/uid:{user}", kernel(), namespace("net"))
}

/// Identifies the PID namespace of this process among those of all machines. Within it a process id stands
/// for one process.
pub(super) fn pid_namespace() -> String {
    format!("{}/pid:{}", kernel(), namespace("pid"))
}

/// Identifies the running kernel. Some sandboxes hide the boot id; the host name replaces it.
fn kernel() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| host_name(), |id| id.trim().to_owned())
}

/// The number of this process's namespace of this kind, 0 if it is not known.
fn namespace(kind: &str) -> u64 {
    rustix::fs::stat(format!("/proc/self/ns/{kind}")).map_or(0, |namespace| namespace.st_ino)
}

/// The number outside of this user namespace of a user, by the namespace's `map`. Those of the first
/// namespaces of containers are the machine's.
fn user_outside(map: &str, user: u32) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u32>().ok());
        let (inside, outside, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let offset = user.checked_sub(inside).filter(|offset| *offset < count)?;
        outside.checked_add(offset)
    })
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
    fn a_user_namespace_is_seen_through() {
        let container = "         0     100000      65536\n     70000       1000          1\n";
        for (map, user, outside) in [
            ("         0          0 4294967295\n", 1000, Some(1000)),
            (container, 0, Some(100_000)),
            (container, 65_535, Some(165_535)),
            (container, 70_000, Some(1000)),
            // As of the overflow uid, which stands for several users.
            (container, 65_536, None),
            ("", 0, None),
            ("0 4294967295 2", 1, None),
            ("0 0 4294967295 and more\nno numbers", 5, Some(5)),
        ] {
            assert_eq!(user_outside(map, user), outside, "{map:?}: {user}");
        }
    }

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
