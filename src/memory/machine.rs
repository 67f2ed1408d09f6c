//! How much memory this process may have.
//!
//! Owns reading the size of the machine's memory and the limit of the process's control group.

use std::path::{Path, PathBuf};

/// Bytes of the machine's memory, or of what the control group of this process, such as a container, may have
/// of it.
pub(super) fn available_memory() -> usize {
    let info = rustix::system::sysinfo();
    let machine = (info.totalram as usize).saturating_mul(info.mem_unit as usize);
    group_limit(Path::new("/")).map_or(machine, |limit| machine.min(limit))
}

/// The least limit of the control groups that this process is in, if there is one. `root` contains `proc` and
/// `sys`.
fn group_limit(root: &Path) -> Option<usize> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let limits = groups.lines().flat_map(|line| {
        // `0::/a/b`, or `4:memory:/a/b` where version 1 is mounted.
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let (folder, name) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|one| one == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        // A container may see its own group at the root, under the path that it has outside.
        let path = PathBuf::from(path.trim_start_matches('/'));
        let read = |group: &Path| std::fs::read_to_string(root.join(folder).join(group).join(name)).ok();
        path.ancestors().filter_map(read).filter_map(|text| text.trim().parse::<usize>().ok()).collect()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(files: &[(&str, &str)]) -> Option<usize> {
        let root = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        }
        group_limit(root.path())
    }

    #[test]
    fn the_least_limit_of_the_groups_of_a_process_counts() {
        let group = ("proc/self/cgroup", "0::/job/step\n");
        let own = ("sys/fs/cgroup/job/step/memory.max", "3000000\n");
        let parent = ("sys/fs/cgroup/job/memory.max", "2000000\n");
        assert_eq!(limit(&[group, own]), Some(3_000_000));
        assert_eq!(limit(&[group, own, parent]), Some(2_000_000));
        assert_eq!(limit(&[group, ("sys/fs/cgroup/job/step/memory.max", "max\n")]), None);
        let inside = [group, ("sys/fs/cgroup/memory.max", "5000000\n")];
        assert_eq!(limit(&inside), Some(5_000_000), "a container sees its group at the root");
        let first = ("proc/self/cgroup", "3:cpu,cpuacct:/a\n2:memory:/a\n0::/\n");
        let file = ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "7000000\n");
        assert_eq!(limit(&[first, file]), Some(7_000_000), "version 1");
        assert_eq!(limit(&[]), None);
    }
}
